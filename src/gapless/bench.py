"""Measure a model on this machine: what it reaches, beside what the machine could."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gapless.arch.sizes import WeightInfo, weight_infos
from gapless.arch.spec import LayerWeights, ModelSpec, ModelWeights
from gapless.doctor import Ceilings
from gapless.engine import Engine, Sink
from gapless.errors import RequestError
from gapless.kernels.count import StepCounter
from gapless.kernels.cpu.abi import PAGE_TOKENS
from gapless.kernels.cpu.isa import select
from gapless.kernels.cpu.kv import KvDtype, page_bytes
from gapless.kernels.cpu.pack import layout_of
from gapless.kernels.cpu.packing import PackedShape
from gapless.llm import LLM
from gapless.models.tensor import WeightTensor
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
    _check_context(llm, max(map(len, prompts)), output_tokens)
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


def _check_context(llm: LLM, prompt_tokens: int, output_tokens: int) -> None:
    limit = llm.scheduler.validate(prompt_tokens)
    if prompt_tokens + output_tokens > limit:
        raise RequestError(
            f"prompt-tokens + output-tokens = {prompt_tokens + output_tokens} exceeds the context of {limit}",
            "lower them or raise --context",
        )


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
    float_weights: bool = False, seed: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Medians and spreads of ``runs`` runs with fresh random prompts, after one that warms up; then floors and sizes.

    Where no token follows another there is no decode rate and no time per token: they are None.

    Raises:
        RequestError: the tokens of a request do not fit the context.
    """
    _check_context(llm, prompt_tokens, output_tokens)  # before prompts of any length are drawn
    rng = random.Random(seed)
    ids = range(min(FIRST_ID, llm.spec.vocab_size - 1), llm.spec.vocab_size)

    def prompts() -> list[list[int]]:
        return [rng.choices(ids, k=prompt_tokens) for _ in range(batch)]

    run_once(llm, prompts(), min(output_tokens, 8))
    results = [run_once(llm, prompts(), output_tokens) for _ in range(runs)]
    figures = {field.name: [getattr(r, field.name) for r in results] for field in fields(Run)}
    medians: dict[str, float | None] = {name: statistics.median(values) for name, values in figures.items()}
    spread: dict[str, list[float] | None] = {name: [min(values), max(values)] for name, values in figures.items()}
    for name in ("decode_tokens_per_s", "tpot_s"):
        if not medians[name]:
            medians[name] = spread[name] = None
    kv_bytes = kv_element_bytes(llm.spec, kv_dtype)
    counter = StepCounter(llm.spec, held_weights(llm, float_weights=float_weights), kv_element_bytes=kv_bytes)
    return {
        "model": llm.model.name,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "runs": runs,
        **medians,
        "spread": spread,
        **_floors(counter, medians, batch, prompt_tokens, output_tokens, ceilings),
        "weights_bytes": held_bytes(llm),
        "kv_bytes": getattr(llm.executor, "kv_bytes", 0),
        "threads": getattr(llm.executor, "n_threads", 1),
        "isa": getattr(llm.executor, "isa", None),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _floors(
    counter: StepCounter, medians: Mapping[str, float | None], batch: int, prompt_tokens: int, output_tokens: int,
    ceilings: Ceilings,
) -> dict[str, Any]:  # fmt: skip
    """The floors of a decode step in the middle of the output, and of the prompts as one step; shares reached."""
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
        "prefill_floor_share": ceilings.floor_s(prefill) / prefill_s if prefill_s else None,
        "prefill_bound": ceilings.bound(prefill),
        "memory_bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        "int8_ops_per_s": ceilings.int8_ops_per_s,
    }


def kv_element_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> float:
    """Bytes of a cached number, with its part of scales and padding."""
    numbers = PAGE_TOKENS * sum(2 * layer.attention.kv_dim for layer in spec.layers)
    return page_bytes(spec, kv_dtype) / numbers


def held_bytes(llm: LLM) -> int:
    """Bytes of the weights as the executor holds them."""
    return int(getattr(llm.executor, "weights_bytes", llm.model.weights_bytes))


def held_weights(llm: LLM, *, float_weights: bool = False) -> ModelWeights[WeightInfo]:
    """The weights with the bytes that a step reads of them: packed by the compiled executor, else those of the file.

    Args:
        float_weights: as the executor was opened with.
    """
    isa = getattr(llm.executor, "isa", None)
    if isa is None:
        return weight_infos(llm.model.weights)
    sizes = _HeldSizes(select(isa).lanes, float_weights)
    weights = llm.model.weights
    embed = sizes.matrix(weights.embed)
    tied = weights.lm_head is weights.embed
    layers = tuple(sizes.layer(layer) for layer in weights.layers)
    head = embed if tied else sizes.matrix(weights.lm_head)
    return ModelWeights(embed, layers, sizes.vector(weights.final_norm), head)


@dataclass(frozen=True)
class _HeldSizes:
    """Sizes of weights once they are packed. Several that are packed as one share the padding of the last."""

    lanes: int
    float_weights: bool

    def matrix(self, tensor: WeightTensor, beside: WeightTensor | None = None) -> WeightInfo:
        """A matrix, or a stack of them; ``beside`` it lies another one, in the layout that holds both."""
        one, other = (t[0] if t is not None and len(t.shape) == 3 else t for t in (tensor, beside))
        assert one is not None
        layout = layout_of((one,) if other is None else (one, other), self.float_weights)
        shape = PackedShape(layout, one.shape[0], one.shape[1], self.lanes)
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        return WeightInfo(tensor.shape, count * shape.nbytes)

    def vector(self, tensor: WeightTensor) -> WeightInfo:
        """A norm or a bias: float32 whatever the file has."""
        return WeightInfo(tensor.shape, 4 * tensor.shape[-1])

    def layer(self, w: LayerWeights[WeightTensor]) -> LayerWeights[WeightInfo]:
        present = {f.name: getattr(w, f.name) for f in fields(w) if getattr(w, f.name) is not None}
        beside = {"gate": w.up, "up": w.gate}
        return LayerWeights(
            **{
                name: self.vector(t) if len(t.shape) == 1 else self.matrix(t, beside.get(name))
                for name, t in present.items()
            }
        )
