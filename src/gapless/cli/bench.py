"""``gapless bench``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gapless.checks import RANGES
from gapless.cli.books import budget_option, metering, parse_budget, show_books
from gapless.cli.options import EngineOptions, engine_options, json_option, model_argument
from gapless.cli.output import note, write, write_json
from gapless.errors import RequestError
from gapless.units import format_bytes, format_count, format_si

if TYPE_CHECKING:
    from gapless.ceilings import Ceilings
    from gapless.ledger.budget import WaitingBudget
    from gapless.llm import LLM
    from gapless.sweep import Over

_BATCH = click.IntRange(1, RANGES["max_running"][1])
_TOKENS = click.IntRange(1, RANGES["context_tokens"][1])
_RUNS = click.IntRange(1, 1000)


@click.command("bench")
@model_argument
@click.option("--batch", type=_BATCH, metavar="N", default=1, show_default=True, help="Requests that run together.")
@click.option("--prompt-tokens", type=_TOKENS, metavar="N", default=128, show_default=True, help="Of each prompt.")
@click.option("--output-tokens", type=_TOKENS, metavar="N", default=128, show_default=True, help="Of each answer.")
@click.option("--runs", type=_RUNS, metavar="N", default=3, show_default=True, help="Runs whose medians are printed.")
@click.option("--sweep", "over", type=click.Choice(["context", "batch", "prompt"]),
              help="Measure at several of these, and how the time of each account grows.")  # fmt: skip
@click.option("--values", metavar="N,N,...", help="At which  [default: some that the model's context holds]")
@click.option("--csv", "csv_file", metavar="PATH", help="Write what a sweep has measured there.")
@click.option("--plot", "plot_file", metavar="PATH", help="Draw it there: PATH.svg or PATH.png.")
@click.option("--ledger/--no-ledger", "books", default=True, help="Book where the time of every token went.")
@click.option("--ledger-file", type=click.Path(path_type=Path), metavar="FILE",
              help="Write the books of every token here, for 'gapless ledger'; gzip if it ends in .gz.")  # fmt: skip
@budget_option
@engine_options
@json_option
def command(
    model: str,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
    runs: int,
    over: Over | None,
    values: str | None,
    csv_file: str | None,
    plot_file: str | None,
    books: bool,
    ledger_file: Path | None,
    budget: str | None,
    engine: EngineOptions,
    as_json: bool,
) -> None:
    """Measure a model: prefill and decode rates, times, sizes, and the floor beside them.

    Every run has fresh random prompts, so that no prefix is found in the cache.
    """
    from dataclasses import replace

    from gapless import sweep
    from gapless.bench import benchmark, held_bytes
    from gapless.doctor import measure_ceilings
    from gapless.llm import DEFAULT_RUNNING

    _check_sweep(over, values, csv_file, plot_file, books, ledger_file, budget)
    waiting = _checked_budget(budget, books, engine)
    asked = _values(values)
    if over == "batch":
        batch = max(asked or sweep.VALUES["batch"])
    if ledger_file is not None:
        _check_file(ledger_file, books, engine)
    if engine.max_running is None:
        engine = replace(engine, max_running=max(DEFAULT_RUNNING, batch))
    with metering(books) as (meter, unmetered), engine.open(model) as llm:
        measure = partial(measure_ceilings, engine.compute_threads, held_bytes(llm), engine.isa, note)
        if over is not None:
            _sweep(llm, over, asked, batch, prompt_tokens, output_tokens, runs, measure, csv_file, plot_file, as_json)
            return
        result = benchmark(
            llm,
            batch=batch,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            runs=runs,
            measure=measure,
            books=books,
            ledger_file=ledger_file,
            budget=waiting,
            meter=meter,
        )
    result["meters"] = [] if meter is None else meter.parts
    if as_json:
        write_json(result)
        return
    _print(result)
    if meter is None and books:
        write(f"energy: not known: {unmetered}")
    elif meter is not None:
        for what in (*meter.left_out, *([meter.failed] if meter.failed else [])):
            write(f"energy: without {what}")


def _check_file(path: Path, books: bool, engine: EngineOptions) -> None:
    """Before anything is measured: nobody should wait for runs whose books are lost."""
    from gapless.ledger.whole import check_writable

    if not books:
        raise RequestError("--ledger-file needs the books that --no-ledger leaves out", "give one of the two")
    if engine.executor == "reference":
        raise RequestError("the reference executor keeps no time of its steps", "use the executor cpu")
    check_writable(path, "ledger-file")


def _checked_budget(text: str | None, books: bool, engine: EngineOptions) -> WaitingBudget | None:
    """Raises RequestError for one that is none, or that no books can be held against."""
    budget = parse_budget(text)
    if budget is not None and not books:
        raise RequestError("--waiting-budget needs the books that --no-ledger leaves out", "give one of the two")
    if budget is not None and engine.executor == "reference":
        raise RequestError("the reference executor keeps no time of its steps", "use the executor cpu")
    return budget


def _check_sweep(
    over: Over | None, values: str | None, csv_file: str | None, plot_file: str | None, books: bool,
    ledger_file: Path | None, budget: str | None,
) -> None:  # fmt: skip
    """Raises UsageError for options that need another."""
    given = {"--values": values, "--csv": csv_file, "--plot": plot_file}
    for name, value in given.items():
        if over is None and value is not None:
            raise click.UsageError(f"{name} is of a sweep: give --sweep too", click.get_current_context())
    if over is not None and ledger_file is not None:
        raise click.UsageError("--ledger-file is of one load: leave --sweep out", click.get_current_context())
    if over is not None and budget is not None:
        raise click.UsageError("--waiting-budget is of one load: leave --sweep out", click.get_current_context())
    if over is not None and not books:
        raise click.UsageError("--sweep books every token: leave --no-ledger out", click.get_current_context())
    if plot_file is not None and not plot_file.lower().endswith((".svg", ".png")):
        raise click.UsageError(f"--plot {plot_file!r} is neither .svg nor .png", click.get_current_context())
    _check_outputs(csv_file, plot_file)


def _check_outputs(csv_file: str | None, plot_file: str | None) -> None:
    """Before anything is measured: nobody should wait for what cannot be written."""
    from gapless.ledger.whole import check_writable
    from gapless.sweep import check_plots

    if plot_file is not None:
        check_plots()
    for field, path in (("plot", plot_file), ("csv", csv_file)):
        if path is not None and (not Path(path).exists() or Path(path).is_file() or Path(path).is_dir()):  # no device
            check_writable(Path(path), field)


def _values(text: str | None) -> list[int]:
    """Of a list like ``1,2,4``; none if there is none."""
    try:
        found = [] if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        found = [0]
    if any(not 0 < value <= RANGES["context_tokens"][1] for value in found):
        raise click.UsageError(f"--values {text!r} is no list like 1,2,4", click.get_current_context())
    return sorted(set(found))


def _sweep(
    llm: LLM, over: Over, asked: list[int], batch: int, prompt_tokens: int, output_tokens: int, runs: int,
    measure: Callable[[], Ceilings], csv_file: str | None, plot_file: str | None, as_json: bool,
) -> None:  # fmt: skip
    from gapless.sweep import VALUES, lines, sweep, write_csv, write_plot

    room = llm.spec.context_tokens if over == "batch" else llm.scheduler.longest - output_tokens
    values = asked or [value for value in VALUES[over] if value <= room]
    if over != "batch" and values[-1] > room:
        raise RequestError(
            f"values: {over} = {values[-1]} with {output_tokens} of output exceeds the context, {room + output_tokens}",
            f"give values up to {room}{llm.scheduler.context_remedy}",
        )
    result = sweep(
        llm, over, values, batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, runs=runs,
        measure=measure, progress=note,
    )  # fmt: skip
    if csv_file is not None:
        write_csv(result, Path(csv_file))
    if plot_file is not None:
        write_plot(result, Path(plot_file))
    if as_json:
        write_json(result)
    else:
        for line in lines(result):
            write(line)


def _print(r: dict[str, Any]) -> None:
    load = f"batch {r['batch']}, {r['prompt_tokens']} + {r['output_tokens']} tokens"
    held = f"{format_bytes(r['weights_bytes'])} packed" if r["isa"] else "as in the file"
    lines = (
        ("model", f"{r['model']}, {held}, {format_count(r['threads'], 'thread')}, {r['isa'] or 'reference'}"),
        ("load", f"{load}, median of {format_count(r['runs'], 'run')}"),
        ("prefill", f"{_rate(r, 'prefill')}; first token after {format_si(r['ttft_s'], 's')}"),
        ("", _floor(r["floor_prefill_s"], "for the prompts", r["prefill_bound"], r["prefill_floor_share"])),
        ("decode", _decode(r)),
        ("", _floor(r["floor_tpot_s"], "a step", r["bound"], r["floor_share"])),
        ("host", f"{100 * r['host_share']:.1f}% of the time outside the executor"),
        ("memory", f"{format_bytes(r['peak_rss_bytes'])} peak; {format_bytes(r['kv_bytes'])} reserved for the cache"),
    )
    for name, text in lines:
        write(f"{name:8} {text}")
    if r["ledger"] is not None:
        write()
        show_books(r["ledger"], n_worst=len(r["ledger"]["worst"]))


def _decode(r: dict[str, Any]) -> str:
    rate = _rate(r, "decode")
    if r["tpot_s"] is not None:
        return f"{rate}; {format_si(r['tpot_s'], 's')} a token"
    if r["output_tokens"] == 1:
        return f"{rate}; - a token"
    return f"{rate}: the first answers ended before the last prompts were read; raise --output-tokens"


def _rate(r: dict[str, Any], phase: str) -> str:
    rate, spread = r[f"{phase}_tokens_per_s"], r["spread"][f"{phase}_tokens_per_s"]
    if rate is None:
        return "- tokens/s"
    return f"{rate:,.0f} tokens/s ({spread[0]:,.0f} to {spread[1]:,.0f})"


def _floor(floor_s: float, of: str, bound: str, share: float | None) -> str:
    reached = "" if share is None else f"; {100 * share:.0f}% of that speed reached"
    if share is not None and share > 1:
        reached += " (others held the machine while its ceilings were measured)"
    return f"floor {format_si(floor_s, 's')} {of}, bound by {bound}{reached}"
