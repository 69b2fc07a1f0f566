"""Who was busy when: the host by account, the device with steps. Integer nanoseconds throughout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gapless.ledger.accounts import N_ACCOUNTS, Account

Ints = npt.NDArray[np.int64]


class Timeline:
    """What the host did and whether the device ran, over any interval.

    Args:
        times, accounts: from ``times[i]`` on the host did what is booked to ``accounts[i]``; in ascending order.
        begun, ended: intervals in which the device ran, disjoint and in ascending order.

    Before the first time nothing is known of the host: ``Account.UNACCOUNTED``.
    """

    def __init__(self, times: Ints, accounts: Ints, begun: Ints, ended: Ints) -> None:
        self._bounds: Ints = np.unique(np.concatenate([times, begun, ended, np.zeros(int(not len(times)), np.int64)]))
        # Few accounts are the host's: sums are kept for those alone. The last is for the time before the first.
        present = np.bincount(accounts, minlength=N_ACCOUNTS) > 0
        present[Account.UNACCOUNTED] = True
        self._columns = np.flatnonzero(present)
        place = present.cumsum() - 1
        self._unknown = int(place[Account.UNACCOUNTED])
        known = place[np.append(accounts, Account.UNACCOUNTED)]
        self._host: Ints = known[np.searchsorted(times, self._bounds, side="right") - 1]
        started = np.searchsorted(begun, self._bounds, side="right")
        self._busy: npt.NDArray[np.bool_] = started > np.searchsorted(ended, self._bounds, side="right")
        lengths = np.diff(self._bounds)
        rows = np.arange(len(lengths))
        spent = np.zeros((len(self._bounds), len(self._columns)), np.int64)
        spent[rows + 1, self._host[:-1]] = lengths
        idle = spent.copy()
        idle[1:][self._busy[:-1]] = 0
        self._spent, self._idle = spent.cumsum(axis=0), idle.cumsum(axis=0)

    def host(self, begin: Ints, end: Ints) -> Ints:
        """Of intervals, what the host did in each: (intervals, accounts)."""
        spent = np.zeros((len(begin), N_ACCOUNTS), np.int64)
        self.add_host(spent, begin, end)
        return spent

    def idle_host(self, begin: Ints, end: Ints) -> Ints:
        """The same of the time in which the device did not run."""
        spent = np.zeros((len(begin), N_ACCOUNTS), np.int64)
        self.add_idle_host(spent, begin, end)
        return spent

    def add_host(self, spent: Ints, begin: Ints, end: Ints) -> None:
        """Add what the host did in intervals to rows of ``spent``, whose columns begin with the accounts."""
        self._add(spent, begin, end, self._spent, False)

    def add_idle_host(self, spent: Ints, begin: Ints, end: Ints) -> Ints:
        """The same of the time in which the device did not run; returns of each interval how long that was."""
        return self._add(spent, begin, end, self._idle, True)

    def _add(self, spent: Ints, begin: Ints, end: Ints, cumulated: Ints, only_idle: bool) -> Ints:
        found = np.zeros(len(begin), np.int64)
        rows = np.flatnonzero(end > begin)
        if len(rows):
            part = self._until(end[rows], cumulated, only_idle) - self._until(begin[rows], cumulated, only_idle)
            spent[rows[:, None], self._columns] += part
            found[rows] = part.sum(axis=1)
        return found

    def _until(self, times: Ints, cumulated: Ints, only_idle: bool) -> Ints:
        """Sums from the first bound to ``times``; negative before it."""
        at = np.searchsorted(self._bounds, times, side="right") - 1
        first = np.maximum(at, 0)
        total: Ints = cumulated[first]
        rest = times - self._bounds[first]
        column = np.where(at < 0, self._unknown, self._host[first])
        if only_idle:
            rest[self._busy[first] & (at >= 0)] = 0
        total[np.arange(len(times)), column] += rest
        return total
