"""What each request has of a step that it shares with others: its time on the device, its bytes and FLOPs.

A step is booked once and divided, so that shares add up to it exactly. An operation is divided equally over the tokens
that it computed, so weights that are read once are shared by all of them; attention by the positions that each token
looks back on; scores and sampling over the tokens that were sampled. This is what a request *cost*; what it *waited
for* is another question, which ``gapless.ledger.attribute`` answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from gapless.executor.timing import SAMPLE_COLUMN, DeviceTimes
from gapless.kernels.count import OpKind
from gapless.ledger.accounts import Account

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Share(IntEnum):
    """Columns of shares: nanoseconds on the device by account, then work."""

    WEIGHTS_NS = 0
    KV_NS = 1
    COMPUTE_NS = 2
    SYNC_NS = 3
    LAUNCH_NS = 4
    SAMPLE_NS = 5
    FLOPS = 6
    WEIGHT_BYTES = 7
    KV_BYTES = 8

    @property
    def label(self) -> str:
        """The name in reports and files."""
        return self.name.lower()


N_SHARES = len(Share)
N_TIMES = Share.FLOPS  # the columns before it are times, in the order of these accounts:
TIMED = (Account.WEIGHTS, Account.KV, Account.COMPUTE, Account.SYNC, Account.LAUNCH, Account.SAMPLE)
_BOUND = ((Share.WEIGHTS_NS, Account.WEIGHTS), (Share.KV_NS, Account.KV), (Share.COMPUTE_NS, Account.COMPUTE))
_OF_CONTEXT = (OpKind.ATTENTION,)
_OF_SAMPLES = (OpKind.LOGITS,)
_OF_TOKENS = tuple(kind for kind in OpKind if kind not in _OF_CONTEXT + _OF_SAMPLES)


@dataclass(frozen=True)
class Keys:
    """What steps are divided by.

    Attributes:
        step: of each span, ascending; every step has a span.
        tokens, context, samples: of each span its tokens, the positions that they look back on, and its samples.
    """

    step: Ints
    tokens: Ints
    context: Ints
    samples: Ints

    @classmethod
    def of(cls, step: Ints, start: Ints, count: Ints, sample: npt.NDArray[np.bool_]) -> Keys:
        return cls(step, count, count * start + count * (count + 1) // 2, sample.astype(np.int64))


def shares(works: Mapping[OpKind, Ints], bound: Ints, times: DeviceTimes, keys: Keys) -> Ints:
    """(spans, N_SHARES); those of a step add up to it.

    Args:
        works: of each kind (fields of Work, steps).
        bound: (steps, kinds), the account of each operation's time.
    """
    n_steps = len(times.begun)
    of_tokens = _sums(_OF_TOKENS, works, bound, times)
    of_context = _sums(_OF_CONTEXT, works, bound, times)
    of_samples = _sums(_OF_SAMPLES, works, bound, times)
    of_samples[:, Share.SAMPLE_NS] = times.by_kind[:, SAMPLE_COLUMN]
    of_tokens[:, Share.SYNC_NS] = times.sync
    whole = of_tokens[:, :N_TIMES].sum(axis=1) + (of_context + of_samples)[:, :N_TIMES].sum(axis=1)
    of_tokens[:, Share.LAUNCH_NS] = times.ended - times.begun - whole
    if len(keys.step) == n_steps:  # one request in each
        return of_tokens + of_context + of_samples
    if (keys.samples == keys.tokens).all():  # all of them decode
        found = divided(of_tokens + of_samples, keys.tokens, keys)
    else:
        found = divided(of_tokens, keys.tokens, keys) + divided(of_samples, keys.samples, keys)
    found += divided(of_context, keys.context, keys)
    return found


def _sums(kinds: tuple[OpKind, ...], works: Mapping[OpKind, Ints], bound: Ints, times: DeviceTimes) -> Ints:
    """Time and work of operations of these kinds: (steps, N_SHARES)."""
    n_steps = len(times.begun)
    found = np.zeros((n_steps, N_SHARES), np.int64)
    for kind in kinds:
        if kind not in works:
            continue
        flops, weight_bytes, read, written = works[kind][:4, :n_steps]
        found[:, Share.FLOPS] += flops
        found[:, Share.WEIGHT_BYTES] += weight_bytes
        found[:, Share.KV_BYTES] += read + written
    at = [_PLACES[kind] for kind in kinds]
    spent, account = times.by_kind[:, at], bound[:n_steps, at]
    for column, of in _BOUND:
        found[:, column] = np.where(account == of, spent, 0).sum(axis=1)
    return found


_PLACES = {kind: place for place, kind in enumerate(OpKind)}


def divided(amounts: Ints, by: Ints, keys: Keys) -> Ints:
    """``amounts`` (steps, columns) over spans in proportion to ``by``, or to tokens where a step has nothing of that.

    Every span gets what lies between two ends that are rounded down, so that all of them get all of it.
    """
    n_steps = len(amounts)
    nothing = np.bincount(keys.step, by, n_steps) == 0
    if nothing.any():
        by = np.where(nothing[keys.step], keys.tokens, by)
    until = by.cumsum()
    first = np.searchsorted(keys.step, np.arange(n_steps))
    base, total = (until - by)[first], np.bincount(keys.step, by, n_steps)
    used = np.flatnonzero(amounts.any(axis=0))
    of_span = amounts[:, used][keys.step]
    high = (of_span * ((until - base[keys.step]) / total[keys.step])[:, None]).astype(np.int64)
    # Whatever a product of reals has made of numbers beyond 2^53.
    high = np.minimum(high, of_span)
    last = np.append(first[1:], len(by)) - 1
    high[last] = of_span[last]
    low = np.zeros_like(high)
    low[1:] = high[:-1]
    low[first] = 0
    found = np.zeros((len(by), amounts.shape[1]), np.int64)
    found[:, used] = high - low
    return found
