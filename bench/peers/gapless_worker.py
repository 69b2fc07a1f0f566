"""gapless behind the same protocol as its peers: loaded once, asleep while another is measured."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from protocol import Timing, claim_stdout, die_with_parent, serve

from gapless import __version__
from gapless.arch.sizes import weight_infos
from gapless.bench import run_once
from gapless.doctor import decode_work, measure_ceilings
from gapless.llm import LLM


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
    def __init__(self, model: str, threads: int) -> None:
        self.llm = LLM(model, threads=threads)
        self._ceilings = measure_ceilings(threads, self.llm.model.weights_bytes)
        self._infos = weight_infos(self.llm.model.weights)

    def run(self, prompts: list[list[int]], output_tokens: int) -> OurTiming:
        run = run_once(self.llm, prompts, output_tokens)
        context = len(prompts[0]) + output_tokens // 2
        work = decode_work(self.llm.spec, self._infos, batch=len(prompts), context_tokens=context, kv_element_bytes=2)
        return OurTiming(
            prefill_s=run.prefill_s,
            prefill_tokens=sum(map(len, prompts)),
            decode_s=run.decode_s,
            decode_tokens=round(run.decode_tokens_per_s * run.decode_s),
            floor_tpot_s=self._ceilings.floor_s(work),
            weights_bytes=self.llm.model.weights_bytes,
            host_share=run.host_share,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    channel = claim_stdout()
    serve(Gapless(args.model, args.threads), channel, {"version": __version__})


if __name__ == "__main__":
    main()
