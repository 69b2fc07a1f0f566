"""Recorded ledgers for tests: made up, and measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from gapless.ceilings import Ceilings
from gapless.cli import main
from gapless.executor.timing import Source
from gapless.ledger.accounts import N_ACCOUNTS, Account
from gapless.ledger.books import Intervals
from gapless.ledger.file import Facts, Recorded, RecordedHost, RecordedSteps
from gapless.ledger.ledger import Totals
from gapless.ledger.shares import N_SHARES, Share

RUNS, BATCH, TOKENS = 2, 2, 6
BENCH = ("--runs", str(RUNS), "--batch", str(BATCH), "--prompt-tokens", "4", "--output-tokens", str(TOKENS),
         "--threads", "1", "--kv-memory", "32MB")  # fmt: skip
FACTS = Facts("m", 2, 4, 3, 2, 1, None, Ceilings(1.0, 2.0, 3.0), "0.1", Source.MEASURED)
MS = 1_000_000


def measure(model: Path) -> Path:
    """The books of a short benchmark, beside the model."""
    path = model.with_name("books.jsonl.gz")
    assert main(["bench", str(model), *BENCH, "--ledger-file", str(path)]) == 0
    return path


def recorded(lengths: dict[tuple[int, int], list[int]]) -> Recorded:
    """Requests with tokens of these lengths, by run and request; the device has half of each, in a step of its own."""
    rows, begin, steps = [], 0, []
    for (run, request), of_tokens in lengths.items():
        for token, length in enumerate(of_tokens):
            rows.append((run, request, token, len(steps), begin, begin + length))
            steps.append((run, len(steps), begin, begin + length // 2, 0))
            begin += length
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    length = columns[5] - columns[4]
    spent, floor = np.zeros((len(rows), N_ACCOUNTS), np.int64), np.zeros((len(rows), N_ACCOUNTS))
    spent[:, Account.WEIGHTS], spent[:, Account.LAUNCH] = length // 2, length - length // 2
    floor[:, Account.WEIGHTS] = 1.5
    later = columns[2] > 0
    totals = Totals(
        len(rows), int(length.sum()), spent.sum(axis=0), floor.sum(axis=0), int(later.sum()),
        spent[later].sum(axis=0), floor[later].sum(axis=0), steps=len(rows),
    )  # fmt: skip
    share = np.zeros((len(rows), N_SHARES), np.int64)
    share[:, Share.WEIGHTS_NS], share[:, Share.FLOPS] = length // 2, 1 << 62
    totals.share, totals.undelivered[Share.KV_BYTES] = share.astype(object).sum(axis=0), 5
    totals.share += totals.undelivered
    runs = 1 + max((run for run, _ in lengths), default=0)
    table = np.array(steps, np.int64).reshape(-1, 5)
    on_device = RecordedSteps(*table.T[:4], table[:, 4:])
    host = RecordedHost(table[:, 0], table[:, 2], np.full(len(table), Account.SCHEDULE))
    beside, joules = np.zeros(len(rows), np.int64), np.where(later, 0.25, np.nan)
    intervals = Intervals(*columns[1:], spent, floor, share, beside, joules)
    return Recorded(replace(FACTS, runs=runs), columns[0], intervals, on_device, host, totals)
