"""Write docs/cli.md from the program itself: ``python tools/cli_reference.py`` (``--check`` to compare only)."""

from __future__ import annotations

from collections.abc import Iterator

import click

from gapless.cli import app
from page import write_page

HEAD = """# Commands

Made by `tools/cli_reference.py` from the program's own help.

Every command takes `--json`: then standard output carries one JSON value and nothing else (of `chat`, one object a
line); an error is `{"error": {"kind", "problem", "remedy", "exit_code"}}`. Notes and progress go to standard error.
Text is UTF-8; where standard output has another encoding, JSON escapes what that lacks, and text shows `?` for it.

| exit code | means |
|---|---|
| 0 | done |
| 1 | a defect in gapless; `GAPLESS_TRACEBACK=1` shows where |
| 2 | a wrong input or a missing resource; the message names the remedy |
| 3 | a device failed |
| 130 | interrupted (Ctrl-C); an error object of the kind `Interrupted` |
| 141 | the reader of standard output has gone |

| variable | means |
|---|---|
| `GAPLESS_CACHE` | folder of models and compiled kernels, instead of the user's cache directory |
| `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` | as huggingface_hub has them |
"""


def reference() -> str:
    context = click.Context(app, info_name="gapless", **app.context_settings)
    return "\n".join([HEAD, *sections(app, context)])


def sections(group: click.Group, context: click.Context) -> Iterator[str]:
    """The help of each command of a group, and below it that of its own commands."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        sub = click.Context(command, info_name=name, parent=context, max_content_width=110, terminal_width=110)
        yield f"## {sub.command_path}\n\n```text\n{command.get_help(sub)}\n```\n"
        if isinstance(command, click.Group):
            yield from sections(command, sub)


if __name__ == "__main__":
    write_page("cli.md", reference(), "cli_reference.py")
