"""``gapless ledger``: recorded ledgers shown, compared and exported."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gapless.cli.books import budget_option, parse_budget, show_books
from gapless.cli.options import json_option
from gapless.cli.output import note, printable, write, write_json
from gapless.errors import RequestError
from gapless.units import format_bytes, format_count, format_si

if TYPE_CHECKING:
    from gapless.ledger.compare import Change
    from gapless.ledger.file import Facts, Recorded

_FILE = click.Path(path_type=Path)
_FORMATS = ("jsonl", "chrome", "parquet", "prometheus", "otlp")


@click.group("ledger", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Look at the books that 'gapless bench --ledger-file' has written."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


# --- show


@command.command("show")
@click.argument("file", type=_FILE)
@budget_option
@json_option
def show(file: Path, budget: str | None, as_json: bool) -> None:
    """Where the time of every token went, how evenly tokens came, and the ten that were waited for longest.

    The time between tokens is that between two tokens of a request as its reader has them. Of it are given the
    percentiles and the jitter: the mean difference, without its sign, of a time and the one before it.
    """
    from gapless.ledger.compare import worst
    from gapless.ledger.file import read
    from gapless.ledger.report import summary_of, with_budget
    from gapless.ledger.stability import token_times

    waiting = parse_budget(budget)
    recorded = read(file)
    slowest, times = worst(recorded), token_times([recorded.intervals], [recorded.run])
    books = summary_of(recorded.totals, [token for _, token in slowest], times, recorded.facts.source)
    if recorded.facts.runs > 1:
        for entry, (run, _) in zip(books["worst"], slowest, strict=True):
            entry["run"] = run
    if waiting is not None:
        books = with_budget(books, waiting, [recorded.intervals])
    if as_json:
        write_json({**asdict(recorded.facts), "ledger": books})
        return
    for text in (*_facts(recorded.facts), ""):
        write(printable(text))
    show_books(books, n_worst=len(slowest))


def _facts(f: Facts) -> tuple[str, ...]:
    return (
        f"model    {f.model}, {format_count(f.threads, 'thread')}, {f.isa or 'reference'}; gapless {f.gapless}",
        f"load     batch {f.batch}, {f.prompt_tokens} + {f.output_tokens} tokens, {format_count(f.runs, 'run')}",
    )


# --- diff


@command.command("diff")
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@json_option
def diff(a: Path, b: Path, as_json: bool) -> None:
    """What a token's time in B differs by from A, account by account.

    A change is significant where Welch's 95% interval, from the means of the runs in each file, holds no 0; each
    file needs two runs or more. Of twenty accounts that are the same, one is then called changed on average.
    """
    from gapless.ledger.compare import changes, differences, time_changes
    from gapless.ledger.file import read

    first, second = read(a), read(b)
    found, times = changes(first, second), time_changes(first, second)
    other = differences(first.facts, second.facts)
    for name, (of_a, of_b) in other.items():
        note(printable(f"A and B differ in {name.replace('_', ' ')}: {of_a} and {of_b}"))
    if as_json:
        write_json({"a": first.facts, "b": second.facts, "differences": other, "accounts": found, "times": times})
        return
    for text in (*_table(found), "", *map(_row, times)):
        write(text)


def _table(found: list[Change]) -> list[str]:
    from gapless.ledger.report import LEAST_SHARE

    *accounts, in_all = found
    least = LEAST_SHARE * max(in_all.a_seconds, in_all.b_seconds)
    shown = [c for c in accounts if max(c.a_seconds, c.b_seconds) > least or c.significant]
    shown.sort(key=lambda c: -abs(c.change_seconds))
    head = f"{'account':12} {'A a token':>11} {'B a token':>11} {'change':>11}"
    return [head, *(_row(c) for c in (*shown, in_all))]


def _row(c: Change) -> str:
    numbers = f"{1e3 * c.a_seconds:8.3f} ms {1e3 * c.b_seconds:8.3f} ms {1e3 * c.change_seconds:+8.3f} ms"
    between = ""
    if c.interval_seconds is not None and c.significant:
        near, far = sorted(map(abs, c.interval_seconds))
        between = f", by {format_si(near, 's')} to {format_si(far, 's')}"
    return f"{c.account:12} {numbers}  {c.verdict}{between}"


# --- export


@command.command("export")
@click.argument("file", type=_FILE)
@click.option("--format", "form", type=click.Choice(_FORMATS), required=True,
              help="JSON lines, Chrome trace events (for Perfetto), Parquet, metrics for Prometheus, or OpenTelemetry "
              "spans.")  # fmt: skip
@click.option("--output", metavar="PATH|URL", required=True,
              help="Where to: a file, replaced if it is there; of otlp also the http(s) address of a "
              "collector.")  # fmt: skip
@json_option
def export(file: Path, form: str, output: str, as_json: bool) -> None:
    """Write the books in another format.

    Parquet, Prometheus and sending to a collector need pip install gapless[export].
    """
    from gapless.ledger import export as exports
    from gapless.ledger.collector import is_url
    from gapless.ledger.file import read

    to_url = is_url(output)
    if to_url and form != "otlp":
        raise RequestError(f"format = {form!r} goes to no address", "give a path, or --format otlp")
    exports.check(exports.OTLP_HTTP if to_url else form)
    recorded = read(file)
    done = _sent(recorded, output) if to_url else _written(recorded, form, Path(output), file)
    if as_json:
        write_json(done | {"format": form, "tokens": recorded.totals.tokens, "steps": recorded.totals.steps})
        return
    spans = f", {format_count(done['spans'], 'span')}" if "spans" in done else ""
    tokens, n_bytes = format_count(recorded.totals.tokens, "token"), format_bytes(done["bytes"])
    write(printable(f"{done['url' if to_url else 'path']}: {tokens}{spans}, {n_bytes}"))


def _sent(recorded: Recorded, url: str) -> dict[str, Any]:
    from gapless.ledger.collector import send

    sent = send(recorded, url)
    return {"url": sent.url, "spans": sent.n_spans, "bytes": sent.n_bytes}


def _written(recorded: Recorded, form: str, output: Path, ledger: Path) -> dict[str, Any]:
    from gapless.ledger import export as exports
    from gapless.ledger.otlp import n_spans, write_otlp
    from gapless.ledger.whole import writing

    if output.exists() and output.samefile(ledger):
        raise RequestError(f"output = {str(output)!r} is the ledger itself", "give another path")
    writers = {
        "jsonl": exports.write_jsonl,
        "chrome": exports.write_chrome,
        "parquet": exports.write_parquet,
        "prometheus": exports.write_prometheus,
        "otlp": write_otlp,
    }
    with writing(output, "output") as target:
        writers[form](recorded, target)
    spans = {"spans": n_spans(recorded)} if form == "otlp" else {}
    return {"path": str(output), **spans, "bytes": output.stat().st_size}
