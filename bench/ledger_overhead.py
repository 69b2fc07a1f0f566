"""What keeping the books costs: runs with a ledger and without, by turns in one process, and the ratio of the rates."""

from __future__ import annotations

import argparse
import random
import statistics
import sys

from gapless.bench import held_bytes, run_once
from gapless.doctor import measure_ceilings
from gapless.llm import LLM
from gapless.machine import allowed_cores

# Answers so long that books are made while they run: of 4,096 tokens, or of 1,024 steps, at once.
CASES = (("decode, 1 request", 1, 16, 1100), ("decode, 8 requests", 8, 16, 560), ("decode, 32 requests", 32, 16, 280))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each kind and case (%(default)s)")
    args = parser.parse_args()
    with LLM(args.model, progress=lambda line: print(line, file=sys.stderr)) as llm:
        ceilings = measure_ceilings(allowed_cores(), held_bytes(llm))
        print("| case | without | with | with / without, median of pairs (quartiles) |")
        print("|---|---|---|---|")
        for name, batch, prompt, output in CASES:
            print(row(llm, name, measured(llm, ceilings, batch, prompt, output, args.pairs)), flush=True)


def measured(llm: LLM, ceilings, batch: int, prompt: int, output: int, pairs: int) -> list[tuple[float, float]]:  # type: ignore[no-untyped-def]
    """Rates (without, with) of each pair; which comes first changes from pair to pair."""
    rng = random.Random(1)

    def rate(books: bool) -> float:
        llm.engine.ledger = None
        if books:
            llm.keep_books(ceilings)
        prompts = [[rng.randrange(100, 30_000) for _ in range(prompt)] for _ in range(batch)]
        return run_once(llm, prompts, output).decode_tokens_per_s

    rate(True)
    found = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        rates = {books: rate(books) for books in order}
        found.append((rates[False], rates[True]))
    llm.engine.ledger = None
    return found


def row(llm: LLM, name: str, pairs: list[tuple[float, float]]) -> str:
    without, with_books = (statistics.median(side) for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([on / off for off, on in pairs], n=4)
    return f"| {name} | {without:,.0f} | {with_books:,.0f} | {middle:.4f} ({low:.4f} to {high:.4f}) |"


if __name__ == "__main__":
    main()
