"""Measure a model on this machine: what it reaches, beside what the machine could."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gapless.arch.sizes import weight_infos
from gapless.doctor import Ceilings, decode_work
from gapless.engine import Engine, Sink
from gapless.errors import RequestError
from gapless.llm import LLM
from gapless.request import FinishReason
from gapless.sampling import SamplingParams
from gapless.step import TokenLogprobs

FIRST_ID = 100  # ids below are the special ones of most vocabularies
KV_ELEMENT_BYTES = {"f16": 2.0, "f32": 4.0, "q8": 1.0 + 4.0 / 64}


@dataclass(frozen=True)
class Run:
    """One run of a batch.

    Attributes:
        prefill_tokens_per_s: prompt tokens over the time until every request has its first token.
        decode_tokens_per_s: tokens that came after that moment, over the time until the last.
        ttft_s: mean time to first token.
        tpot_s: mean over requests of the time per token after the first.
        host_share: time outside the executor over time in the engine's loop.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    tpot_s: float
    host_share: float


class _Clock(Sink):
    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = False
        self.error: Exception | None = None

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        self.times.append(time.perf_counter())
        return False

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        self.done, self.error = True, error


def run_once(llm: LLM, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
    """Run the prompts together, each to exactly ``output_tokens`` tokens, greedily. Raises RequestError."""
    engine: Engine = llm.engine
    sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    for prompt in prompts:
        limit = llm.scheduler.validate(len(prompt))
        if len(prompt) + output_tokens > limit:
            raise RequestError(
                f"prompt-tokens + output-tokens = {len(prompt) + output_tokens} exceeds the context of {limit}",
                "lower them or raise --context",
            )
    clocks = [_Clock() for _ in prompts]
    before = (engine.stats.busy_s, engine.stats.executor_s)
    started = time.perf_counter()
    for prompt, clock in zip(prompts, clocks, strict=True):
        engine.submit(prompt, sampling, [clock])
    with engine.driving:
        while not all(c.done for c in clocks):
            engine.step()
    for clock in clocks:
        if clock.error is not None:
            raise clock.error
    busy, inside = engine.stats.busy_s - before[0], engine.stats.executor_s - before[1]
    return _summary(clocks, started, sum(map(len, prompts)), 1.0 - inside / busy)


def _summary(clocks: Sequence[_Clock], started: float, prompt_tokens: int, host_share: float) -> Run:
    first = max(c.times[0] for c in clocks)
    last = max(c.times[-1] for c in clocks)
    late = sum(t > first for c in clocks for t in c.times)
    gaps = [(c.times[-1] - c.times[0]) / (len(c.times) - 1) for c in clocks if len(c.times) > 1]
    return Run(
        prefill_tokens_per_s=prompt_tokens / (first - started),
        decode_tokens_per_s=late / (last - first) if late else 0.0,
        prefill_s=first - started,
        decode_s=last - first,
        ttft_s=statistics.fmean(c.times[0] - started for c in clocks),
        tpot_s=statistics.fmean(gaps) if gaps else 0.0,
        host_share=host_share,
    )


def benchmark(
    llm: LLM, *, batch: int, prompt_tokens: int, output_tokens: int, runs: int, kv_dtype: str, ceilings: Ceilings,
    seed: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Medians of ``runs`` runs with fresh random prompts, after one that warms up; then floors and sizes."""
    rng = random.Random(seed)
    top = llm.spec.vocab_size

    def prompts() -> list[list[int]]:
        return [[rng.randrange(min(FIRST_ID, top - 1), top) for _ in range(prompt_tokens)] for _ in range(batch)]

    run_once(llm, prompts(), min(output_tokens, 8))
    results = [run_once(llm, prompts(), output_tokens) for _ in range(runs)]
    medians = {name: statistics.median(getattr(r, name) for r in results) for name in asdict(results[0])}
    work = decode_work(
        llm.spec,
        weight_infos(llm.model.weights),
        batch=batch,
        context_tokens=prompt_tokens + output_tokens // 2,
        kv_element_bytes=KV_ELEMENT_BYTES[kv_dtype],
    )
    floor = ceilings.floor_s(work)
    return {
        "model": llm.model.name,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "runs": runs,
        **medians,
        "decode_tokens_per_s_runs": [r.decode_tokens_per_s for r in results],
        "prefill_tokens_per_s_runs": [r.prefill_tokens_per_s for r in results],
        "weights_bytes": getattr(llm.executor, "weights_bytes", llm.model.weights_bytes),
        "kv_bytes": getattr(llm.executor, "kv_bytes", 0),
        "step_bytes": work.memory_bytes,
        "step_flops": work.flops,
        "floor_tpot_s": floor,
        "floor_share": floor / medians["tpot_s"] if medians["tpot_s"] else None,
        "bound": ceilings.bound(work),
        "memory_bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        "int8_ops_per_s": ceilings.int8_ops_per_s,
        "threads": getattr(llm.executor, "n_threads", 1),
        "isa": getattr(llm.executor, "isa", None),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
