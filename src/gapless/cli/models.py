"""``gapless models``."""

from __future__ import annotations

import click

from gapless.cli.options import json_option
from gapless.cli.output import write, write_json
from gapless.units import format_bytes


@click.command("models")
@json_option
def command(as_json: bool) -> None:
    """List the built-in models, and those that are in the cache."""
    from gapless.models.store import list_models

    models = list_models()
    if as_json:
        rows = [
            {"name": m.name, "source": m.source, "path": str(m.path) if m.path else None, "present": m.path is not None,
             "size_bytes": m.size_bytes, "about": m.about}
            for m in models
        ]  # fmt: skip
        write_json(rows)
        return
    width = max(len(m.name) for m in models)
    for m in models:
        state = "here" if m.path else "not fetched"
        write(f"{m.name:{width}}  {format_bytes(m.size_bytes):>8}  {state:11}  {m.about}")
