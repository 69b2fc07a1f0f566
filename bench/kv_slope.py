"""What a thousand tokens of history cost a decode step: the slope of the kv account, over bytes / measured bandwidth.

Each round decodes at every context in turn and measures the bandwidth once; prompts are read from the prefix cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys

import numpy as np

from gapless.bench import held_bytes, run_once
from gapless.doctor import measure_ceilings
from gapless.executor.measure import memory_bandwidth
from gapless.ledger.accounts import Account
from gapless.llm import LLM
from gapless.machine import allowed_cores

READ_BYTES = 300 << 20  # of the bandwidth's measurement: a step reads about as much


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--contexts", default="512,2048,4096,6144,8000", help="(%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=48, help="whose middle lies at the context (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    args = parser.parse_args()
    contexts = [int(value) for value in args.contexts.split(",")]
    output = args.output_tokens
    with LLM(args.model, progress=lambda line: print(line, file=sys.stderr)) as llm:
        llm.keep_books(measure_ceilings(allowed_cores(), held_bytes(llm)))
        rng = random.Random(1)
        prompts = [[rng.randrange(100, 30_000) for _ in range(context - output // 2)] for context in contexts]
        for prompt in prompts:
            run_once(llm, [prompt], output)
        found, rates = [], []
        for _ in range(args.rounds):
            found.append([kv_seconds(llm, prompt, output) for prompt in prompts])
            rates.append(memory_bandwidth(allowed_cores(), n_bytes=READ_BYTES))
        report(llm, contexts, np.array(found), rates)


def kv_seconds(llm: LLM, prompt: list[int], output: int) -> float:
    """The kv account of a token behind the first."""
    totals = llm.engine.ledger.totals  # type: ignore[union-attr]
    spent, tokens = int(totals.later_spent_ns[Account.KV]), totals.later_tokens
    run_once(llm, [prompt], output)
    return (int(totals.later_spent_ns[Account.KV]) - spent) * 1e-9 / (totals.later_tokens - tokens)


def report(llm: LLM, contexts: list[int], found: np.ndarray, rates: list[float]) -> None:  # type: ignore[type-arg]
    count = llm.executor.counter.count  # type: ignore[union-attr]
    here, further = (count([(x, 1)]).total.kv_read_bytes for x in (contexts[0], contexts[-1]))
    per_token = (further - here) / (contexts[-1] - contexts[0])
    slopes = [float(np.polyfit(contexts, row, 1)[0]) for row in found]
    ratios = [slope * rate / per_token for slope, rate in zip(slopes, rates, strict=True)]
    print("| context | kv account, ms a token (median) |\n|---|---|")
    for context, column in zip(contexts, found.T, strict=True):
        print(f"| {context:,} | {1e3 * statistics.median(column):.3f} |")
    rate, slope = statistics.median(rates), statistics.median(slopes)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"\n{per_token:,.0f} bytes a token at {rate / 1e9:.1f} GB/s: {1e6 * per_token / rate:.3f} ms a 1,000 tokens;")
    print(f"booked to kv: {1e6 * slope:.3f} ms. Ratio, median of rounds: {middle:.2f} ({low:.2f} to {high:.2f}).")


if __name__ == "__main__":
    main()
