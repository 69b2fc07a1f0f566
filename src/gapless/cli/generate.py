"""``gapless generate``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from gapless.cli.books import budget_option, keep_books, metering, note_books, parse_budget
from gapless.cli.options import (
    EngineOptions,
    engine_options,
    json_option,
    model_argument,
    read_prompts,
    sampling_options,
)
from gapless.cli.output import note, printable, write, write_json
from gapless.errors import RequestError
from gapless.outputs import Completion, RequestOutput, StreamPiece
from gapless.sampling import SamplingParams

if TYPE_CHECKING:
    from gapless.ledger.budget import WaitingBudget
    from gapless.ledger.ledger import Ledger

N_WORST = 3  # of the tokens that were waited for longest are named


@click.command("generate")
@model_argument
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to go on from (repeatable).")
@click.option("--prompt-file", "files", multiple=True, metavar="PATH",
              help="The same from a file, without its last newline; - is stdin. Files come after texts.")  # fmt: skip
@click.option("--priority", "priorities", type=int, multiple=True, metavar="N",
              help="For --policy priority, the greatest first: one for all prompts, or one for each.")  # fmt: skip
@click.option("--ledger/--no-ledger", "books", default=None,
              help="Say on standard error where the time went  [default: to a terminal]")  # fmt: skip
@budget_option
@click.option("--chat", is_flag=True, help="Put each prompt as a question, in the model's chat format.")
@sampling_options(samples=True, max_tokens=256)
@engine_options
@json_option
def command(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    priorities: tuple[int, ...],
    books: bool | None,
    budget: str | None,
    chat: bool,
    sampling: SamplingParams,
    engine: EngineOptions,
    as_json: bool,
) -> None:
    """Go on from one prompt or several, all at once.

    Text is written as it comes; the answers to several prompts in their order, each behind its number. With --json
    it is an object for one answer and a list of them for several: "prompt_index" and "index" count prompts and their
    samples from 0.
    """
    if sampling.logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: text has no place for them", click.get_current_context())
    texts = read_prompts(prompts, files)
    priority = priorities if len(priorities) > 1 else (*priorities, 0)[0]
    waiting = parse_budget(budget)
    wanted = waiting is not None or (sys.stderr.isatty() if books is None else books)
    writer = None if as_json else InOrder(len(texts), sampling.n)
    with metering(wanted) as (meter, _), engine.open(model) as llm:
        asked = [llm.chat_prompt([{"role": "user", "content": text}]) if chat else text for text in texts]
        refused = None
        ledger = keep_books(llm, engine, bool(books) or waiting is not None, meter) if wanted else None
        outputs = llm.generate(asked, sampling, on_text=None if writer is None else writer.take, priority=priority)
        if ledger is not None:
            llm.settle()
            refused = _show_books(ledger, waiting)
    if as_json:
        objects = [_object(number, output, c) for number, output in enumerate(outputs) for c in output.outputs]
        write_json(objects[0] if len(objects) == 1 else objects)
    if refused is not None:
        note(f"error: {refused.problem}; {refused.remedy}")
        click.get_current_context().exit(2)


def _show_books(ledger: Ledger, budget: WaitingBudget | None) -> RequestError | None:
    """On standard error; the answer stands, whatever is wrong with the budget: that is given back."""
    from gapless.ledger.report import summary

    try:
        note_books(summary(ledger, budget), n_worst=N_WORST)
    except RequestError as problem:
        note_books(summary(ledger), n_worst=N_WORST)
        return problem
    return None


class InOrder:
    """Writes answers that grow together one after the other: the first as it comes, the rest when it is their turn."""

    def __init__(self, n_prompts: int, n_samples: int) -> None:
        self._n_samples = n_samples
        self._held = [""] * (n_prompts * n_samples)
        self._ended = [False] * len(self._held)
        self._turn = 0
        self._begun = False

    def take(self, prompt: int, piece: StreamPiece) -> None:
        """Hold a piece of an answer and write what may be written."""
        answer = prompt * self._n_samples + piece.index
        self._held[answer] += printable(piece.text)
        self._ended[answer] |= piece.finish_reason is not None
        while self._turn < len(self._held) and (self._held[self._turn] or self._ended[self._turn]):
            self._write()
            if not self._ended[self._turn]:
                break
            write("" if len(self._held) == 1 else "\n")
            self._turn, self._begun = self._turn + 1, False

    def _write(self) -> None:
        """What is held of the answer whose turn it is, behind its number where there are several."""
        if not self._begun and len(self._held) > 1:
            prompt, sample = divmod(self._turn, self._n_samples)
            mark = f".{sample + 1}" if self._n_samples > 1 else ""
            write(f"[{prompt + 1}{mark}] ", end="")
        self._begun = True
        write(self._held[self._turn], end="")
        self._held[self._turn] = ""


def _object(prompt_index: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "prompt_index": prompt_index,
        "index": completion.index,
    }
    if completion.logprobs is not None:
        found["logprobs"] = [
            {"logprob": p.chosen, "top": [{"token_id": i, "logprob": x} for i, x in zip(p.top_ids, p.top, strict=True)]}
            for p in completion.logprobs
        ]
    return found
