"""Pages of the documentation that the program makes: written, or with ``--check`` only compared."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def write_page(name: str, text: str, tool: str) -> None:
    """Write ``docs/NAME``, or end with an error that names ``tool`` if it is another text."""
    target = DOCS / name
    if "--check" in sys.argv:
        sys.exit(0 if target.read_text() == text else f"docs/{name} is stale: run tools/{tool}")
    target.write_text(text)
