"""The books as metrics for Prometheus: the same families of a recorded run and of a ledger that is being kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gapless.ledger.accounts import Account
from gapless.ledger.books import Intervals
from gapless.ledger.ledger import Totals
from gapless.ledger.shares import N_TIMES, TIMED, Share

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Upper ends of the buckets of times between tokens: 0.1 ms to 10 s. Nanoseconds, so that a time at an end is below it.
BOUNDS_NS = (*(step * 10**power for power in range(5, 10) for step in (1, 2, 3, 5)), 10**10)


class TokenSeconds:
    """A histogram of times between tokens of a request.

    It is kept apart from the intervals: a ledger forgets old ones, and what is counted may never fall.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(len(BOUNDS_NS) + 1, np.int64)
        self.total_ns = 0

    def add(self, intervals: Intervals) -> None:
        """Intervals that have been booked; the first of a request is none between tokens."""
        length = (intervals.end - intervals.begin)[intervals.token > 0]
        self.counts += np.bincount(np.searchsorted(BOUNDS_NS, length), minlength=len(self.counts))
        self.total_ns += int(length.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Upper ends in seconds, and how many times do not exceed them."""
        ends = [str(bound / 1e9) for bound in BOUNDS_NS]
        return list(zip([*ends, "+Inf"], self.counts.cumsum().tolist(), strict=True))


def families(totals: Totals, times: TokenSeconds) -> Iterator[Metric]:
    """Needs prometheus_client. Joules that are not known have no family: a 0 would say that nothing was used.

    Every account has its series from the start, so that the first increase of each is seen. Totals that are still
    growing are to be read by the thread that books: between two bookings they agree with each other.
    """
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    on_device = np.zeros(len(Account), object)
    on_device[list(TIMED)] = totals.share[:N_TIMES]
    by_account: list[tuple[str, str, Any]] = [
        ("seconds", "What tokens waited for, first tokens from the arrival of their request", totals.spent_ns / 1e9),
        ("floor_seconds", "The least that it can be on this machine", totals.floor_ns / 1e9),
        ("hidden_seconds", "What the host did while the device ran", totals.hidden_ns / 1e9),
        ("device_seconds", "Time of steps on the device, however many tokens shared them", on_device / 1e9),
    ]
    if totals.joules is not None:
        by_account.append(("joules", "Energy of steps, however many tokens shared them", totals.joules))
    for name, meaning, values in by_account:
        family = CounterMetricFamily(f"gapless_ledger_{name}_total", f"{meaning}.", labels=["account"])
        for account in Account:
            family.add_metric([account.label], float(values[account]))
        yield family
    yield CounterMetricFamily("gapless_ledger_tokens_total", "Tokens booked.", totals.tokens)
    yield CounterMetricFamily("gapless_ledger_steps_total", "Steps that have landed.", totals.steps)
    flops = float(totals.share[Share.FLOPS])
    yield CounterMetricFamily("gapless_ledger_flops_total", "FLOPs of steps.", flops)
    moved = CounterMetricFamily("gapless_ledger_bytes_total", "Bytes that steps moved.", labels=["kind"])
    moved.add_metric(["weights"], float(totals.share[Share.WEIGHT_BYTES]))
    moved.add_metric(["kv"], float(totals.share[Share.KV_BYTES]))
    yield moved
    meaning = "Times between two tokens of a request, as its reader has them."
    yield HistogramMetricFamily("gapless_ledger_token_seconds", meaning, times.buckets(), times.total_ns / 1e9)
