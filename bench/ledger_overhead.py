"""What keeping the books costs: some decode steps with a ledger and without, by turns in one process, many times.

With a ledger the time includes booking what those steps left: about as much as is booked at once in any case.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from gapless.bench import held_bytes
from gapless.doctor import measure_ceilings
from gapless.engine import Sink
from gapless.llm import LLM
from gapless.machine import allowed_cores
from gapless.request import FinishReason
from gapless.sampling import SamplingParams
from gapless.step import TokenLogprobs

# Requests that decode together, and steps that are timed at once: shorter than what else runs on the machine lasts.
CASES = ((1, 512), (8, 256), (32, 128))
PROMPT = 16


class Counter(Sink):
    """Takes tokens as a client does."""

    def __init__(self) -> None:
        self.tokens = 0

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        self.tokens += 1
        return False

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        if error is not None:
            raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--pairs", type=int, default=40, help="of each case (%(default)s)")
    args = parser.parse_args()
    with LLM(args.model, progress=lambda line: print(line, file=sys.stderr)) as llm:
        ceilings = measure_ceilings(allowed_cores(), held_bytes(llm))
        print("| requests | a step without | with | with / without, median of pairs (95% interval) |")
        print("|---|---|---|---|")
        for batch, steps in CASES:
            pairs = [pair(llm, ceilings, batch, steps, first=i % 2 == 0) for i in range(args.pairs + 1)]
            print(row(batch, pairs[1:]), flush=True)


def pair(llm: LLM, ceilings, batch: int, steps: int, *, first: bool) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Seconds of a step (without, with); ``first`` says whether the one with books comes first."""
    found = {}
    for books in (first, not first):
        llm.engine.ledger = None
        if books:
            llm.keep_books(ceilings)
        found[books] = seconds_a_step(llm, batch, steps)
    llm.engine.ledger = None
    return found[False], found[True]


def seconds_a_step(llm: LLM, batch: int, steps: int) -> float:
    """Of steps in which all requests decode, with the time to book them."""
    engine = llm.engine
    sampling = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
    counters = [Counter() for _ in range(batch)]
    for counter in counters:
        engine.submit([random.randrange(100, 30_000) for _ in range(PROMPT)], sampling, [counter])
    with engine.driving:
        while not all(counter.tokens for counter in counters):
            engine.step()
        engine.book()
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        engine.book()
        took = time.perf_counter() - started
        while engine.has_work:
            engine.step()
        engine.book()
    return took / steps


def row(batch: int, pairs: list[tuple[float, float]]) -> str:
    without, with_books = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(on / off for off, on in pairs)
    low, high = interval(len(ratios))
    middle = statistics.median(ratios)
    spread = f"{middle:.4f} ({ratios[low]:.4f} to {ratios[high]:.4f})"
    return f"| {batch} | {without:.3f} ms | {with_books:.3f} ms | {spread} |"


def interval(n: int) -> tuple[int, int]:
    """Ranks between which the median of what ``n`` sorted values were drawn from lies in 95% of all cases."""
    half = 0.98 * n**0.5  # 1.96 deviations of a binomial distribution at 1/2
    return max(0, int(n / 2 - half)), min(n - 1, int(n / 2 + half))


if __name__ == "__main__":
    main()
