"""``gapless chat``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from gapless.cli.options import EngineOptions, engine_options, json_option, model_argument, sampling_options
from gapless.cli.output import note, printable, write_json
from gapless.errors import RequestError
from gapless.outputs import StreamPiece
from gapless.sampling import SamplingParams

if TYPE_CHECKING:
    from gapless.llm import LLM

_HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


@click.command("chat")
@model_argument
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@sampling_options(max_tokens=512, temperature=0.7, top_p=0.95)
@engine_options
@json_option
def command(model: str, system: str | None, sampling: SamplingParams, engine: EngineOptions, as_json: bool) -> None:
    """Talk with a model. Lines of standard input are questions; with --json every answer is an object on a line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and earlier ones found again)
    with engine.open(model) as llm:
        first = [{"role": "system", "content": system}] if system else []
        llm.template  # noqa: B018  (a model without one is an error now, not after the first question)
        if not as_json:
            note(f"{llm.model.name}: {_HELP}")
        messages = list(first)
        while (line := _read(as_json)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(first)
            elif line.startswith("/"):
                note(_HELP)
            elif line:
                messages = _turn(llm, [*messages, {"role": "user", "content": line}], sampling, as_json)


def _read(as_json: bool) -> str | None:
    """A line without its end; None at the end of the input."""
    while True:
        try:
            return input("" if as_json else "> ").strip()
        except EOFError:
            if not as_json:
                click.echo()
            return None
        except KeyboardInterrupt:
            click.echo()
            note(_HELP)


def _turn(llm: LLM, messages: list[dict[str, str]], sampling: SamplingParams, as_json: bool) -> list[dict[str, str]]:
    """Ask, show the answer, and return the conversation with it."""
    pieces: list[str] = []

    def show(_: int, piece: StreamPiece) -> None:
        pieces.append(piece.text)
        if not as_json:
            click.echo(printable(piece.text), nl=False)

    reason: str | None = "abort"
    try:
        reason = llm.chat(messages, sampling, on_text=show).finish_reason
    except KeyboardInterrupt:
        pass
    except RequestError as problem:
        note(f"error: {problem}")
        return messages[:-1]
    answer = "".join(pieces)
    if as_json:
        found: dict[str, Any] = {"text": answer, "finish_reason": reason}
        write_json(found)
    else:
        click.echo()
    return [*messages, {"role": "assistant", "content": answer}]
