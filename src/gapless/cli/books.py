"""The books in a terminal: their table, and the bar in colours where there are any."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

from gapless.cli.output import note, write

if TYPE_CHECKING:
    from gapless.cli.options import EngineOptions
    from gapless.energy import EnergyMeter
    from gapless.ledger.budget import WaitingBudget
    from gapless.ledger.ledger import Ledger
    from gapless.ledger.report import Paint
    from gapless.llm import LLM

UNMEASURED = "'gapless doctor --measure', once, lets answers end with where their time went"
_COLOURS = ("cyan", "blue", "magenta", "yellow")

budget_option = click.option(
    "--waiting-budget", "budget", metavar="TIME[,ACCOUNT=TIME...]",
    help="Share this time per token (TPOT) over the accounts; say which take more. Like 20ms.",
)  # fmt: skip


def parse_budget(text: str | None) -> WaitingBudget | None:
    """Raises RequestError."""
    from gapless.ledger.budget import WaitingBudget

    return None if text is None else WaitingBudget.parse(text)


@contextmanager
def metering(wanted: bool) -> Iterator[tuple[EnergyMeter | None, str]]:
    """A meter of the energy used, closed behind the block; or None, and why there is none."""
    from gapless.energy import NoMeter, open_meter

    if not wanted:
        yield None, "no books are kept"
        return
    meter = open_meter()
    if isinstance(meter, NoMeter):
        yield None, meter.why
        return
    try:
        yield meter, ""
    finally:
        meter.close()


def keep_books(llm: LLM, engine: EngineOptions, asked: bool, meter: EnergyMeter | None = None) -> Ledger | None:
    """Begin a ledger, with the ceilings that are known of this machine.

    Where none are known they are measured if it was asked for, which takes a second or two; else a line says how to.

    Raises GaplessError where it was asked for and the executor keeps no time of its steps.
    """
    from gapless.bench import held_bytes
    from gapless.doctor import known_ceilings, measure_ceilings
    from gapless.kernels.cpu.isa import select

    if llm.executor.profile is None and not asked:
        return None
    llm.check_stamped()
    load = (engine.compute_threads, held_bytes(llm), select(engine.isa).name)
    ceilings = known_ceilings(*load)
    if ceilings is None and not asked:
        if sys.stderr.isatty():
            note(UNMEASURED)
        return None
    return llm.keep_books(ceilings or measure_ceilings(*load, note), meter)


def show_books(books: dict[str, Any], *, n_worst: int = 0) -> None:
    """On standard output."""
    from gapless.ledger.report import lines

    for line in lines(books, _paint(sys.stdout), n_worst):
        write(line)


def note_books(books: dict[str, Any], *, n_worst: int = 0) -> None:
    """On standard error, behind an empty line."""
    from gapless.ledger.report import lines

    for line in ("", *lines(books, _paint(sys.stderr), n_worst)):
        note(line)


def _paint(stream: TextIO) -> Paint:
    from gapless.ledger.report import plain

    colours = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
    return _coloured if colours else plain


def _coloured(place: int, cells: str) -> str:
    return click.style(cells, fg=_COLOURS[place % len(_COLOURS)]) if cells else ""
