"""The ceilings are what loops really do: the optimiser has taken nothing out of them."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

from cpu_ops import ISAS
from gapless.executor import measure
from gapless.kernels.cpu import build
from gapless.kernels.cpu.isa import Isa
from gapless.kernels.cpu.probe import DOT_SUMS, READ_STREAMS

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 assembly")

DOTS = {"vnni512": "vpdpbusd", "vnni256": "vpdpbusd", "maddubs": "vpmaddubsw", "widen": "pmaddwd"}
ASSEMBLY = (
    "from gapless.kernels.cpu import build, probe; "
    "print(build.compile_kernel(*probe.KERNELS[{kernel!r}]).library.get_asm_str())"
)


def loops(kernel: str, isa: Isa) -> list[str]:
    """Assembly of the basic blocks that jump to themselves."""
    done = subprocess.run(
        [sys.executable, "-c", ASSEMBLY.format(kernel=kernel)],
        env=build.target_environment(isa), capture_output=True, text=True, check=True,
    )  # fmt: skip
    blocks = re.split(r"^(\.LBB\w+):", done.stdout, flags=re.MULTILINE)[1:]
    return [
        body for label, body in zip(blocks[::2], blocks[1::2], strict=True) if re.search(rf"\tj\w+\t{label}\b", body)
    ]


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_every_product_is_in_the_loop(isa: Isa) -> None:
    found = max(len(re.findall(rf"\t{DOTS[isa.dot]}\t", body)) for body in loops("probe_multiply", isa))
    assert found >= DOT_SUMS == measure.DOT_SUMS


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_every_float_product_is_in_the_loop(isa: Isa) -> None:
    """Without an instruction for it each lane is a call."""
    one = r"\tvfmadd\w+\t" if isa.dot != "widen" else r"\tcall\w*\t"
    found = max(len(re.findall(one, body)) for body in loops("probe_multiply_floats", isa))
    assert found >= DOT_SUMS


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_every_read_is_in_the_loop(isa: Isa) -> None:
    read = re.compile(r"^\tv?(?:p?xor\w*|mov\w+|pternlog\w+)\t[^\n]*\(%r", re.MULTILINE)
    found = max(len(read.findall(body)) for body in loops("probe_read", isa))
    assert found >= READ_STREAMS
