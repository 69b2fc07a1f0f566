"""gapless behind the same protocol as its peers: loaded once, asleep while another is measured."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from protocol import Timing, claim_stdout, die_with_parent, serve

from gapless import __version__
from gapless.bench import held_bytes, run_once
from gapless.doctor import measure_ceilings
from gapless.kernels.cpu.abi import PAGE_TOKENS
from gapless.kernels.cpu.kv import page_bytes
from gapless.llm import LLM
from gapless.models.load import load_model

FILL_TOKENS = 496  # and their answer: whole pages


@dataclass
class OurTiming(Timing):
    """With the floor of a decode step in the middle of the case, from the ceilings measured at the start."""

    floor_tpot_s: float
    weights_bytes: int
    host_share: float

    def to_json(self) -> dict[str, float]:
        return {
            **super().to_json(),
            "floor_tpot_s": self.floor_tpot_s,
            "weights_bytes": self.weights_bytes,
            "host_share": self.host_share,
        }


class Gapless:
    def __init__(self, model: str, threads: int, cache_tokens: int) -> None:
        # Room for the largest case, as llama.cpp's contexts have it, and used once, as those are filled with zeros:
        # memory comes slowly from the system, in virtual machines above all, and whom that struck would be chance.
        pages = -(-cache_tokens // PAGE_TOKENS)
        room = pages * page_bytes(load_model(Path(model)).spec, "f16")
        self.llm = LLM(model, threads=threads, kv_memory_bytes=room)
        self._ceilings = measure_ceilings(threads, held_bytes(self.llm))
        rng = random.Random(0)
        for _ in range(0, pages * PAGE_TOKENS, FILL_TOKENS):
            run_once(self.llm, [[rng.randrange(100, 32_000) for _ in range(FILL_TOKENS)]], 1)

    def run(self, prompts: list[list[int]], output_tokens: int) -> OurTiming:
        run = run_once(self.llm, prompts, output_tokens)
        context = len(prompts[0]) + output_tokens // 2
        work = self.llm.executor.counter.count([(context, 1)] * len(prompts)).total
        return OurTiming(
            prefill_s=run.prefill_s,
            prefill_tokens=sum(map(len, prompts)),
            decode_s=run.decode_s,
            decode_tokens=run.decode_tokens,
            floor_tpot_s=self._ceilings.floor_s(work),
            weights_bytes=held_bytes(self.llm),
            host_share=run.host_share,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-tokens", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    channel = claim_stdout()
    serve(Gapless(args.model, args.threads, args.cache_tokens), channel, {"version": __version__})


if __name__ == "__main__":
    main()
