"""``gapless doctor``."""

from __future__ import annotations

import click

from gapless.cli.options import DEFAULT_MODEL, json_option
from gapless.cli.output import note, write_json
from gapless.units import format_bytes, format_si


@click.command("doctor")
@click.argument("model", required=False)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Compute threads  [default: allowed cores]")
@click.option("--isa", metavar="NAME", help="Instruction set  [default: the best of this machine]")
@click.option("--context", type=click.IntRange(min=0), default=0, metavar="TOKENS", help="Tokens before this one.")
@json_option
def command(model: str | None, threads: int | None, isa: str | None, context: int, as_json: bool) -> None:
    """What this machine offers, measured, and the least time that a model's token takes on it.

    MODEL is the default model, if it has been fetched, where none is given.
    """
    from dataclasses import asdict

    from gapless import __version__
    from gapless.arch.sizes import weight_infos
    from gapless.doctor import floor_of, inspect_machine
    from gapless.errors import ModelError
    from gapless.models.load import load_model
    from gapless.models.store import cache_dir, resolve

    try:
        path = resolve(model or DEFAULT_MODEL, download=model is not None)
    except ModelError:
        if model is not None:
            raise
        path = None
    loaded = None if path is None else load_model(path)
    working_set = 1 << 28 if loaded is None else loaded.weights_bytes
    machine = inspect_machine(threads, isa, working_set, note)
    floor = None
    if loaded is not None:
        floor = floor_of(
            loaded.name, loaded.spec, weight_infos(loaded.weights), loaded.weights_bytes, 2.0, context, machine.ceilings
        )
    if as_json:
        facts = asdict(machine)
        ceilings = facts.pop("ceilings")
        facts["memory_bandwidth_bytes_per_s"] = ceilings["bandwidth_bytes_per_s"]
        facts["int8_ops_per_s"] = ceilings["int8_ops_per_s"]
        write_json({"version": __version__, **facts, "cache": str(cache_dir()), "floor": floor})
        return
    c = machine.ceilings
    rows = [
        ("gapless", __version__),
        ("processor", f"{machine.processor} ({machine.architecture})"),
        ("features", " ".join(machine.features)),
        ("path", f"{machine.isa} (of {', '.join(machine.isa_choices)})"),
        ("cores", f"{machine.cores_allowed} allowed of {machine.cores_present}; {machine.threads} threads"),
        ("memory", f"{format_si(c.bandwidth_bytes_per_s, 'B/s')} measured, reading {format_bytes(working_set)}"),
        ("int8", f"{format_si(c.int8_ops_per_s, 'op/s')} measured"),
        ("cache", str(cache_dir())),
    ]
    if floor is not None:
        what = f"{format_si(floor.floor_tpot_s, 's')} a token, {floor.floor_tokens_per_s:,.0f} tokens/s"
        rows.append(("floor", f"{floor.model}: {what} (batch 1, bound by {floor.bound})"))
    else:
        rows.append(("floor", f"run: gapless pull {DEFAULT_MODEL}"))
    for name, text in rows:
        click.echo(f"{name:10} {text}")
