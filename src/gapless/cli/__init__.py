"""The ``gapless`` command. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from gapless import __version__
from gapless.cli.output import ErrorReport, drop, report_error
from gapless.cli.streams import prepare_streams

EPILOG = (
    "MODEL is a name from 'gapless models', hf:ORG/REPO[@REVISION], hf:ORG/REPO/FILE.gguf, hf:ORG/REPO:QUANT (such as "
    "Q4_0), or the path of a GGUF file or model folder."
)


class _Commands(click.Group):
    """Imports a command's module when the command is looked up."""

    names = ("demo", "generate", "chat", "bench", "pull", "models", "doctor", "ledger")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.names:
            return None
        from importlib import import_module

        command = import_module(f"gapless.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Commands,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="gapless %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    """LLM inference that waits least.

    Every command takes --json: then standard output carries one JSON value and nothing else (of chat, one object a
    line); progress and notes go to standard error. An error is one line on standard error and, with --json, an
    object {"error": ...} on standard output.

    Exit codes: 0 done, 1 a defect in gapless, 2 a wrong input or a missing resource, 3 a failed device,
    130 interrupted, 141 the reader of standard output has gone.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Never raises for what a user can cause."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in args
    prepare_streams()
    try:
        # Not by ``app.main``, which has exit codes of its own.
        with app.make_context("gapless", args) as context:
            app.invoke(context)
        sys.stdout.flush()
        return 0
    except (KeyboardInterrupt, click.Abort) as stop:
        return report_error(ErrorReport.of(stop), as_json=as_json)
    except BrokenPipeError:  # the reader has gone
        drop(sys.stdout)
        return 141
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except Exception as problem:
        if os.environ.get("GAPLESS_TRACEBACK") == "1":
            raise
        return report_error(ErrorReport.of(problem), as_json=as_json)
