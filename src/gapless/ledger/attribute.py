"""What the time of a step on the device is booked to, for each request that it computed for.

An operation's time goes to the account of what bounds it: reading weights, reading the cache, or arithmetic. Where
other requests' prompts ran beside a request, its share of an operation is what the roofline says it would have taken
without them, over what it says of all of it; the rest is ``neighbours``. Tokens that decode beside each other are no
neighbours in this sense: they share what the step reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.ceilings import Ceilings
from gapless.executor.timing import N_COLUMNS, SAMPLE_COLUMN, DeviceTimes
from gapless.kernels.count import OpKind, StepCounter, Steps
from gapless.ledger.accounts import N_ACCOUNTS, Account
from gapless.ledger.shares import Keys, shares

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_KINDS = list(OpKind)
_INT8 = (OpKind.LINEAR, OpKind.LOGITS, OpKind.EXPERTS)
_OF_CACHE = (OpKind.ROPE_CACHE, OpKind.ATTENTION)
_MEMORY = np.array([Account.KV if kind in _OF_CACHE else Account.WEIGHTS for kind in _KINDS], np.int64)
# Measured with the product before or behind them, where they are fused into it.
_FUSED = {OpKind.GATED: OpKind.LINEAR, OpKind.ADD: OpKind.LINEAR}


@dataclass(frozen=True)
class SpanColumns:
    """Spans of steps.

    Attributes:
        step: index into the steps' columns.
        start, count: positions.
        sample: whether its last position is sampled.
        prompt: whether it reads a prompt (or computes again), and does not decode.
    """

    step: Ints
    start: Ints
    count: Ints
    sample: Bools
    prompt: Bools


@dataclass(frozen=True)
class Booked:
    """
    Attributes:
        device: (spans, accounts), what each span's step is booked to for its request; adds up to the step's time.
        floor: (spans, accounts), the floor of that. Both in nanoseconds.
        share: (spans, N_SHARES), what of each step is the request's when it is divided.
        beside: (spans,), prompt tokens of others in its step.
    """

    device: Ints
    floor: Floats
    share: Ints
    beside: Ints


def attribute(counter: StepCounter, ceilings: Ceilings, times: DeviceTimes, spans: SpanColumns) -> Booked:
    """Book steps to the requests that they computed for."""
    n_steps = len(times.begun)
    steps, variant = _variants(n_steps, spans)
    works = counter.count_steps(steps)
    memory_s, arithmetic_s = _floors(works, ceilings, steps)
    of = np.arange(steps.n_steps)  # the step that each variant is of
    of[variant] = spans.step
    floor_ns = 1e9 * np.maximum(memory_s, arithmetic_s).T  # (variants, kinds)
    whole = floor_ns[of]
    part = np.divide(floor_ns, whole, out=np.ones_like(whole), where=whole > 0)
    by_kind = times.by_kind[of]
    own = by_kind.copy()
    own[:, :SAMPLE_COLUMN] = np.minimum(own[:, :SAMPLE_COLUMN], (own[:, :SAMPLE_COLUMN] * part).astype(np.int64))
    bound = np.where(memory_s >= arithmetic_s, _MEMORY[:, None], Account.COMPUTE).T
    device = np.zeros((steps.n_steps, N_ACCOUNTS), np.int64)
    floor = np.zeros((steps.n_steps, N_ACCOUNTS))
    for account in (Account.WEIGHTS, Account.KV, Account.COMPUTE):
        here = bound == account
        device[:, account] = np.where(here, own[:, :SAMPLE_COLUMN], 0).sum(axis=1)
        floor[:, account] = np.where(here, floor_ns, 0).sum(axis=1)
    device[:, Account.SAMPLE] = own[:, SAMPLE_COLUMN]
    device[:, Account.NEIGHBOURS] = (by_kind - own).sum(axis=1)
    device[:, Account.SYNC] = times.sync[of]
    device[:, Account.LAUNCH] = (times.ended - times.begun)[of] - device.sum(axis=1)
    divided = shares(works, bound, times, Keys.of(spans.step, spans.start, spans.count, spans.sample))
    return Booked(device[variant], floor[variant], divided, _beside(n_steps, spans))


def _beside(n_steps: int, spans: SpanColumns) -> Ints:
    """Of each span the prompt tokens of others in its step."""
    mine = np.where(spans.prompt, spans.count, 0)
    if not mine.any():
        return mine
    of_step: Ints = np.bincount(spans.step, mine, n_steps).astype(np.int64)
    beside: Ints = of_step[spans.step] - mine
    return beside


def _variants(n_steps: int, spans: SpanColumns) -> tuple[Steps, Ints]:
    """Steps to be counted, the whole ones first, and of each span the one that has no prompts of others in it."""
    if not spans.prompt.any():
        samples = np.bincount(spans.step, spans.sample, n_steps).astype(np.int64)
        return Steps(n_steps, spans.step, spans.start, spans.count, samples), spans.step
    n_prompts = np.bincount(spans.step[spans.prompt], minlength=n_steps)
    variant = spans.step.copy()
    lists = [(spans.step, np.arange(len(spans.step)))]  # step, and its span
    n = n_steps
    decodes = np.flatnonzero(~spans.prompt & (n_prompts[spans.step] > 0))
    if len(decodes):  # they share one: the step without any prompt
        mixed, place = np.unique(spans.step[decodes], return_inverse=True)
        variant[decodes] = n + place
        lists.append((n + place, decodes))
        n += len(mixed)
    for span in np.flatnonzero(spans.prompt & (n_prompts[spans.step] > 1)):  # each its own
        beside = np.flatnonzero((spans.step == spans.step[span]) & ~spans.prompt)
        members = np.append(beside, span)
        lists.append((np.full(len(members), n, np.int64), members))
        variant[span] = n
        n += 1
    step, span = (np.concatenate([each[i] for each in lists]) for i in range(2))
    samples = np.bincount(step, weights=spans.sample[span], minlength=n).astype(np.int64)
    return Steps(n, step, spans.start[span], spans.count[span], samples), variant


def _floors(works: Mapping[OpKind, Ints], ceilings: Ceilings, steps: Steps) -> tuple[Floats, Floats]:
    """Seconds for memory and for arithmetic: (kinds, steps) each."""
    memory, arithmetic = np.zeros((2, len(_KINDS), steps.n_steps))
    for kind, work in works.items():
        flops, weight_bytes, kv_read, kv_write = work[:4]
        at = _KINDS.index(_FUSED.get(kind, kind))
        rate = ceilings.int8_ops_per_s if kind in _INT8 else ceilings.float_ops_per_s
        memory[at] += (weight_bytes + kv_read + kv_write) / ceilings.bandwidth_bytes_per_s
        arithmetic[at] += flops / rate
    return memory, arithmetic


assert len(_KINDS) + 1 == N_COLUMNS
