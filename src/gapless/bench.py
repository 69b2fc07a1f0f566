"""Measure a model on this machine: what it reaches, beside what the machine could."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gapless.arch.sizes import weight_infos
from gapless.arch.spec import ModelSpec
from gapless.doctor import Ceilings
from gapless.engine import Engine, Sink
from gapless.errors import RequestError
from gapless.kernels.count import StepCounter
from gapless.kernels.cpu.abi import PAGE_TOKENS
from gapless.kernels.cpu.kv import KvDtype, page_bytes
from gapless.llm import LLM
from gapless.request import FinishReason
from gapless.sampling import SamplingParams
from gapless.step import TokenLogprobs

FIRST_ID = 100  # ids below are the special ones of most vocabularies


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
    llm: LLM, *, batch: int, prompt_tokens: int, output_tokens: int, runs: int, kv_dtype: KvDtype, ceilings: Ceilings,
    seed: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Medians and spreads of ``runs`` runs with fresh random prompts, after one that warms up; then floors and sizes.

    Raises:
        RequestError: the tokens of a request do not fit the context.
    """
    rng = random.Random(seed)
    top = llm.spec.vocab_size

    def prompts() -> list[list[int]]:
        return [[rng.randrange(min(FIRST_ID, top - 1), top) for _ in range(prompt_tokens)] for _ in range(batch)]

    run_once(llm, prompts(), min(output_tokens, 8))
    results = [run_once(llm, prompts(), output_tokens) for _ in range(runs)]
    figures = {field.name: [getattr(r, field.name) for r in results] for field in fields(Run)}
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return {
        "model": llm.model.name,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "runs": runs,
        **medians,
        "spread": {name: [min(values), max(values)] for name, values in figures.items()},
        **_floors(llm, medians, batch, prompt_tokens, output_tokens, kv_dtype, ceilings),
        "weights_bytes": getattr(llm.executor, "weights_bytes", llm.model.weights_bytes),
        "kv_bytes": getattr(llm.executor, "kv_bytes", 0),
        "threads": getattr(llm.executor, "n_threads", 1),
        "isa": getattr(llm.executor, "isa", None),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _floors(
    llm: LLM, medians: Mapping[str, float], batch: int, prompt_tokens: int, output_tokens: int, kv_dtype: KvDtype,
    ceilings: Ceilings,
) -> dict[str, Any]:  # fmt: skip
    """The floors of a decode step in the middle of the output, and of the prompts as one step; shares reached."""
    counter = StepCounter(
        llm.spec, weight_infos(llm.model.weights), kv_element_bytes=kv_element_bytes(llm.spec, kv_dtype)
    )
    decode = counter.count([(prompt_tokens + output_tokens // 2, 1)] * batch).total
    prefill = counter.count([(0, prompt_tokens)] * batch).total
    tpot_s, prefill_s = medians["tpot_s"], medians["prefill_s"]
    return {
        "floor_tpot_s": ceilings.floor_s(decode),
        "floor_share": ceilings.floor_s(decode) / tpot_s if tpot_s else None,
        "bound": ceilings.bound(decode),
        "step_bytes": decode.memory_bytes,
        "step_flops": decode.flops,
        "floor_prefill_s": ceilings.floor_s(prefill),
        "prefill_floor_share": ceilings.floor_s(prefill) / prefill_s,
        "prefill_bound": ceilings.bound(prefill),
        "memory_bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        "int8_ops_per_s": ceilings.int8_ops_per_s,
    }


def kv_element_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> float:
    """Bytes of a cached number, with its part of scales and padding."""
    numbers = PAGE_TOKENS * sum(2 * layer.attention.kv_dim for layer in spec.layers)
    return page_bytes(spec, kv_dtype) / numbers
