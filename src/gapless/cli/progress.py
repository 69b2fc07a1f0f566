"""A progress bar for downloads, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gapless.models.store import Progress


@contextlib.contextmanager
def downloading(name: str) -> Iterator[Progress]:
    """Yields a callback of (bytes done, bytes in all); the bar appears with its first call."""
    from tqdm import tqdm

    bar: tqdm | None = None

    def update(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(desc=f"fetching {name}", total=total, unit="B", unit_scale=True, initial=0, miniters=1)
        bar.total = total
        bar.update(done - bar.n)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()
