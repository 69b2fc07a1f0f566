"""Memory that the process may still use."""

from __future__ import annotations

from pathlib import Path

from gapless.errors import ResourceError


def available_bytes() -> int:
    """What the system has available, bounded by the control group's limit (version 1 or 2)."""
    limits = [_meminfo()]
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):
            continue
    return max(0, min(limits))


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 1 << 62


def check_memory(needed_bytes: int, what: str, remedy: str) -> None:
    """Raises ResourceError if ``what`` needs more than is available."""
    available = available_bytes()
    if needed_bytes > available:
        raise ResourceError(
            f"{what} needs {needed_bytes / 1e9:.2f} GB of memory, {available / 1e9:.2f} GB are available", remedy
        )
