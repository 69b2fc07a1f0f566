"""What a device reaches at most, and the least time that work can take on it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gapless.kernels.count import Work


@dataclass(frozen=True)
class Ceilings:
    """
    Attributes:
        bandwidth_bytes_per_s: of reads over a working set like the model's.
        int8_ops_per_s: of the products of quantised weights; a multiply-add is two.
        float_ops_per_s: of everything else.
    """

    bandwidth_bytes_per_s: float
    int8_ops_per_s: float
    float_ops_per_s: float

    def highest(self, other: Ceilings) -> Ceilings:
        """Of two measurements what each has reached more of."""
        return Ceilings(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def floor_s(self, work: Work) -> float:
        """The roofline: no step with this work can take less."""
        return max(self.memory_s(work), self.arithmetic_s(work))

    def memory_s(self, work: Work) -> float:
        return work.memory_bytes / self.bandwidth_bytes_per_s

    def arithmetic_s(self, work: Work) -> float:
        return work.flops / self.int8_ops_per_s

    def bound(self, work: Work) -> str:
        """Which ceiling sets the floor: "memory" or "arithmetic"."""
        return "memory" if self.memory_s(work) >= self.arithmetic_s(work) else "arithmetic"
