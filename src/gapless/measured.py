"""What this machine reaches at most, measured once and kept in the cache directory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gapless.ceilings import Ceilings
from gapless.ledger.whole import replacing
from gapless.models.store import cache_dir

VERSION = 2  # 1 held arithmetic rates of vectors that crossed cache lines: half of what there is
WORKING_SETS = tuple(1 << bits for bits in (20, 22, 24, 25, 26, 27, 28, 29, 31))  # from a cache's to beyond all of them


@dataclass(frozen=True)
class Measured:
    """
    Attributes:
        processor, isa, threads: what was measured: figures of another are not taken for it.
        bandwidth: bytes read again and again, and at how many a second.
        int8_ops_per_s, float_ops_per_s: of products in registers; a multiply-add is two.
    """

    processor: str
    isa: str
    threads: int
    bandwidth: tuple[tuple[int, float], ...]
    int8_ops_per_s: float
    float_ops_per_s: float

    def highest(self, other: Measured) -> Measured:
        """Of two measurements of the same what each has reached more of: a busy machine shows less than it can."""
        known = dict(other.bandwidth)
        return Measured(
            self.processor, self.isa, self.threads,
            tuple((size, max(rate, known.get(size, 0.0))) for size, rate in self.bandwidth),
            max(self.int8_ops_per_s, other.int8_ops_per_s), max(self.float_ops_per_s, other.float_ops_per_s),
        )  # fmt: skip

    def ceilings(self, working_set_bytes: int) -> Ceilings:
        """For steps that read so many bytes; between two sizes the rate is interpolated by their logarithms."""
        sizes, rates = [math.log2(size) for size, _ in self.bandwidth], [rate for _, rate in self.bandwidth]
        at = math.log2(max(working_set_bytes, 1))
        low = max(sum(size <= at for size in sizes) - 1, 0)
        high = min(low + 1, len(sizes) - 1)
        part = 0.0 if high == low else min(max((at - sizes[low]) / (sizes[high] - sizes[low]), 0.0), 1.0)
        return Ceilings(rates[low] + part * (rates[high] - rates[low]), self.int8_ops_per_s, self.float_ops_per_s)


def measure(processor: str, threads: int, isa: str, progress: Callable[[str], None] | None = None) -> Measured:
    """Time plain reads of several sizes and the kernels' multiply-adds. Takes some seconds."""
    from gapless.executor import measure as probes

    bandwidth = tuple(
        (size, probes.memory_bandwidth(threads, isa, n_bytes=size, progress=progress)) for size in WORKING_SETS
    )
    rates = (f(threads, isa, progress=progress) for f in (probes.int8_rate, probes.float_rate))
    return Measured(processor, isa, threads, bandwidth, *rates)


def path_of(isa: str, threads: int) -> Path:
    return cache_dir() / "machine" / f"{isa}-{threads}.json"


def store(found: Measured) -> Path:
    """Keep it for later, with what was reached before; returns where. Raises OSError if it cannot be written."""
    before = stored(found.processor, found.threads, found.isa)
    found = found if before is None else found.highest(before)
    path = path_of(found.isa, found.threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps({"version": VERSION, **asdict(found)}).encode())
    return path


def stored(processor: str, threads: int, isa: str) -> Measured | None:
    """What was kept of this processor; None where there is nothing that can be used."""
    try:
        return _parsed(json.loads(path_of(isa, threads).read_text()), processor, threads, isa)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it is measured anew then
        return None


def _parsed(values: Any, processor: str, threads: int, isa: str) -> Measured | None:
    if values["version"] != VERSION or (values["processor"], values["threads"], values["isa"]) != (
        processor, threads, isa,
    ):  # fmt: skip
        return None
    bandwidth = tuple((int(size), _rate(rate)) for size, rate in values["bandwidth"])
    if not bandwidth or sorted(bandwidth)[0][0] < 1 or list(bandwidth) != sorted(bandwidth):
        return None
    return Measured(
        processor, isa, threads, bandwidth, _rate(values["int8_ops_per_s"]), _rate(values["float_ops_per_s"])
    )


def _rate(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(value)
    return float(value)
