"""What this process may use of the machine."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

from gapless.errors import ResourceError


def allowed_cores() -> int:
    """Cores that the process may use: its affinity, bounded by a cgroup CPU quota (version 1 or 2)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cores()
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


def start_thread(thread: threading.Thread) -> None:
    """Raises ResourceError if the system refuses it."""
    try:
        thread.start()
    except RuntimeError:
        raise ResourceError(
            f"the system refuses another thread ({thread.name})", "lower --threads, or raise the limit (ulimit -u)"
        ) from None


def cgroup_cores(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The tightest CPU quota over this process's control group and its parents, in cores; None without one."""
    quotas = [q for folder in _folders(root, membership) if (q := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders(root: Path, membership: Path) -> list[Path]:
    folders = [root, root / "cpu"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        own = base / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 and period_us > 0 else None
    except (OSError, ValueError):
        return None
