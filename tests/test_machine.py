"""The cores that the process may use, by affinity and by both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gapless import machine
from gapless.machine import allowed_cores, cgroup_cores


def cgroup(root: Path, membership: str, files: dict[str, str]) -> float | None:
    for name, text in files.items():
        (root / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "fs" / name).write_text(text)
    (root / "self").write_text(membership)
    return cgroup_cores(root / "fs", root / "self")


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
        ("0::/gone\n", {}, None),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "250000", "cpu/x/cpu.cfs_period_us": "100000"}, 2.5),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("3:memory:/y\n", {"cpu/y/cpu.cfs_quota_us": "100000", "cpu/y/cpu.cfs_period_us": "100000"}, None),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, None),
        ("0::/../../etc\n", {"cpu.max": "100000 100000"}, 1.0),
    ],
)  # fmt: skip
def test_quotas(tmp_path: Path, membership: str, files: dict[str, str], cores: float | None) -> None:
    assert cgroup(tmp_path, membership, files) == cores


def test_without_control_groups(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path / "none", tmp_path / "nothing") is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (2.9, 2), (0.4, 1), (64.0, 4)])
def test_the_quota_bounds_the_affinity(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6}, raising=False)
    monkeypatch.setattr(machine, "cgroup_cores", lambda: quota)
    assert allowed_cores() == cores
