"""What an install brings: no torch, and under 250 MB."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED_BYTES = 250e6
# What a fresh environment holds besides: pip, which fetches the built-in models, and the interpreter's own files.
BESIDE_BYTES = 10e6


def locked(file: str) -> list[str]:
    lines = (ROOT / file).read_text().splitlines()
    return [line.split("==")[0] for line in lines if line and not line.startswith("#")]


def disk_bytes(package: str) -> int:
    """Space that a package takes, without byte code, which is written when it is used."""
    files = [file.locate() for file in metadata.files(package) or [] if file.suffix != ".pyc"]
    return sum(Path(file).stat().st_blocks * 512 for file in files if Path(file).exists())


def test_the_default_install_is_small() -> None:
    sizes = {name: disk_bytes(name) for name in locked("requirements.lock")}
    assert sizes["llvmlite"] > 10e6, "nothing was measured"
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) + BESIDE_BYTES < ALLOWED_BYTES, largest


@pytest.mark.parametrize("file", ["requirements.lock", "requirements-test.lock", "requirements-dev.lock"])
def test_nothing_asks_for_torch(file: str) -> None:
    assert not {"torch", "transformers", "triton"} & set(locked(file))
