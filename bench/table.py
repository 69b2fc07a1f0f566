"""The benchmark table of the README on this machine: every row in one process, medians of several runs."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from gapless.bench import benchmark, held_bytes
from gapless.doctor import measure_ceilings
from gapless.llm import LLM
from gapless.machine import allowed_cores

ROWS = (
    ("decode, 1 request", 1, 16, 128),
    ("decode, 1 request at 512 tokens", 1, 512, 128),
    ("decode, 8 requests", 8, 32, 128),
    ("decode, 32 requests", 32, 32, 128),
    ("prefill of 512 tokens", 1, 512, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="(%(default)s)")
    args = parser.parse_args()
    threads = allowed_cores()
    print("| row | tokens/s | of the floor | host | bound by |")
    print("|---|---|---|---|---|")
    with LLM(args.model, progress=lambda line: print(line, file=sys.stderr)) as llm:
        measure = partial(measure_ceilings, threads, held_bytes(llm))
        for name, batch, prompt, output in ROWS:
            result = benchmark(
                llm, batch=batch, prompt_tokens=prompt, output_tokens=output, runs=args.runs, measure=measure
            )
            print(line(name, result), flush=True)


def line(name: str, result: dict[str, Any]) -> str:
    """A row of the table: of its decode steps, or of its prompts where no token follows the first."""
    if result["decode_tokens_per_s"] is None:
        rate, share, bound = (result[key] for key in ("prefill_tokens_per_s", "prefill_floor_share", "prefill_bound"))
    else:
        rate, share, bound = (result[key] for key in ("decode_tokens_per_s", "floor_share", "bound"))
    return f"| {name} | {rate:,.0f} | {share:.0%} | {result['host_share']:.1%} | {bound} |"


if __name__ == "__main__":
    main()
