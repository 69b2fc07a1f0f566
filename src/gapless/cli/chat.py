"""``gapless chat``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from gapless.cli.books import UNMEASURED, keep_books, note_books
from gapless.cli.options import EngineOptions, engine_options, json_option_of, model_argument, sampling_options
from gapless.cli.output import ErrorReport, cut_mark, note, printable, report_error, write, write_json
from gapless.cli.streams import valid_text
from gapless.errors import RequestError
from gapless.outputs import StreamPiece
from gapless.sampling import SamplingParams

if TYPE_CHECKING:
    from gapless.llm import LLM

Messages = list[dict[str, str]]

N_WORST = 3  # of the tokens that were waited for longest are named

_HELP = "/reset begins anew, /ledger says where the time went, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


@click.command("chat")
@model_argument
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@sampling_options(samples=False, max_tokens=512, temperature=0.7, top_p=0.95)
@engine_options
@json_option_of("Write a JSON object on a line of standard output for each question.")
def command(model: str, system: str | None, sampling: SamplingParams, engine: EngineOptions, as_json: bool) -> None:
    """Talk with a model. Lines of standard input are questions.

    A line /reset begins anew, /ledger says where the time of the tokens has gone, /exit or Ctrl-D leaves, Ctrl-C ends
    an answer. No question begins with a slash.

    With --json there is an object on a line for each question: the answer, or {"error": ...}; the conversation goes on
    without a question that failed.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and earlier ones found again)
    first = [{"role": "system", "content": valid_text(system, "--system")}] if system else []
    with engine.open(model) as llm:
        llm.template  # noqa: B018  (a model without one is an error now, not after the first question)
        if not as_json:
            note(f"{llm.name}: {_HELP}")
        keep_books(llm, engine, asked=False)
        messages = list(first)
        while (line := _read(as_json)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(first)
            elif line == "/ledger":
                _show_books(llm)
            elif line.startswith("/"):
                note(f"{printable(line.split()[0])} is no command: {_HELP}")
            elif line:
                messages = _turn(llm, messages, line, sampling, as_json)


def _show_books(llm: LLM) -> None:
    from gapless.ledger.report import summary

    ledger = llm.ledger
    if ledger is None:
        return note(UNMEASURED)
    llm.settle()
    note_books(summary(ledger), n_worst=N_WORST)


def _read(as_json: bool) -> str | None:
    """A line without its end; None at the end of the input. Only someone at a terminal is prompted and reminded."""
    asks = sys.stdin.isatty()
    while True:
        try:
            return input("> " if asks and not as_json else "").strip()
        except EOFError:
            if asks and not as_json:
                write()
            return None
        except KeyboardInterrupt:
            if not asks:
                raise
            if not as_json:
                write()
            note(_HELP)


def _turn(llm: LLM, messages: Messages, line: str, sampling: SamplingParams, as_json: bool) -> Messages:
    """Ask, show the answer, and return the conversation with it; as it was if it cannot be asked."""
    try:
        asked = [*messages, {"role": "user", "content": valid_text(line, "the question")}]
        prompt = _prompt(llm, asked)
        answer, reason = _answer(llm, prompt, sampling, live=not as_json)
    except RequestError as problem:
        report_error(ErrorReport.of(problem), as_json=as_json)
        return messages
    if as_json:
        write_json({"text": answer, "finish_reason": reason})
    else:
        write(cut_mark() if reason in ("length", "abort") else "")
    return [*asked, {"role": "assistant", "content": answer}]


def _prompt(llm: LLM, messages: Messages) -> list[int]:
    """The conversation as token ids. Raises RequestError; one that has become too long says how to go on."""
    prompt = llm.chat_prompt(messages)
    try:
        llm.scheduler.validate(len(prompt))
    except RequestError as problem:
        if not any(message["role"] == "assistant" for message in messages):
            raise
        raise RequestError(
            f"the conversation has outgrown the context: {problem.problem}", "/reset begins anew"
        ) from None
    return prompt


def _answer(llm: LLM, prompt: list[int], sampling: SamplingParams, *, live: bool) -> tuple[str, str | None]:
    """The answer and why it ended: "abort" where someone at a terminal has pressed Ctrl-C."""
    pieces: list[str] = []

    def show(_: int, piece: StreamPiece) -> None:
        pieces.append(piece.text)
        if live:
            write(printable(piece.text), end="")

    reason: str | None = "abort"
    try:
        reason = llm.generate([prompt], sampling, on_text=show)[0].finish_reason
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    return "".join(pieces), reason
