"""``gapless doctor``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gapless.checks import RANGES
from gapless.cli.options import DEFAULT_MODEL, Threads, json_option
from gapless.cli.output import note, write, write_json
from gapless.errors import RequestError
from gapless.units import format_bytes, format_count, format_si

if TYPE_CHECKING:
    from gapless.doctor import FloorReport, MachineReport
    from gapless.measured import Measured
    from gapless.models.load import LoadedModel

NO_MODEL_BYTES = 1 << 28  # read for the bandwidth where there is no model whose size could be taken
_BEFORE = click.IntRange(0, RANGES["context_tokens"][1])


@click.command("doctor")
@click.argument("model", required=False)
@click.option("--threads", type=Threads(), metavar="N", help="Compute threads  [default: allowed cores]")
@click.option("--isa", metavar="NAME", help="Instruction set  [default: the best of this machine]")
@click.option("--context", type=_BEFORE, default=0, metavar="TOKENS", help="Tokens before this one.")
@click.option("--measure", is_flag=True, help="Measure reads of many sizes too, and keep all for later.")
@json_option
def command(
    model: str | None, threads: int | None, isa: str | None, context: int, measure: bool, as_json: bool
) -> None:
    """What this machine offers, measured, and the least time that a model's token takes on it.

    MODEL is the default model, if it has been fetched, where none is given. Memory bandwidth is that of reading as
    many bytes as the model's weights have, again and again. With --measure the figures are kept in the cache directory,
    where `generate --ledger` finds them.
    """
    from gapless.doctor import floor_of, inspect_machine
    from gapless.kernels.cpu.held import kv_element_bytes, packed_infos
    from gapless.kernels.cpu.isa import select

    loaded = _load(model)
    if loaded is not None and context >= loaded.spec.context_tokens:
        raise RequestError(
            f"--context {context} leaves no room for a token: the model's context is {loaded.spec.context_tokens}",
            f"give at most {loaded.spec.context_tokens - 1}",
        )
    working_set = NO_MODEL_BYTES if loaded is None else loaded.weights_bytes
    machine = inspect_machine(threads, isa, working_set, note)
    kept = _measure(machine) if measure else None
    floor = None
    if loaded is not None:
        infos = packed_infos(loaded.weights, select(machine.isa).lanes, False)
        kv_bytes = kv_element_bytes(loaded.spec, "f16")
        floor = floor_of(model or DEFAULT_MODEL, loaded.spec, infos, kv_bytes, context, machine.ceilings)
    if as_json:
        write_json(_object(machine, floor) | {"measured": kept})
    else:
        for name, text in _rows(machine, floor):
            write(f"{name:10} {text}")
        for size, rate in () if kept is None else kept.bandwidth:
            write(f"{'':10} {format_si(rate, 'B/s')} reading {format_bytes(size)}")


def _measure(machine: MachineReport) -> Measured:
    from gapless.measured import measure, store

    found = measure(machine.processor, machine.threads, machine.isa, note)
    note(f"kept in {store(found)}")
    return found


def _load(model: str | None) -> LoadedModel | None:
    """The model; None if none was named and the default one has not been fetched."""
    from gapless.errors import ModelError
    from gapless.models.load import load_model
    from gapless.models.store import resolve

    if model is not None:
        return load_model(resolve(model))
    try:
        return load_model(resolve(DEFAULT_MODEL, download=False))
    except ModelError:
        return None


def _caches(machine: MachineReport) -> dict[str, Path]:
    from gapless.models.store import cache_dir

    return {"models": cache_dir() / "models", "kernels": cache_dir() / "kernels" / machine.isa}


def _object(machine: MachineReport, floor: FloorReport | None) -> dict[str, Any]:
    from gapless.doctor import can_write, versions

    caches = _caches(machine)
    facts = asdict(machine)
    ceilings = facts.pop("ceilings")
    return {
        "versions": versions(),
        **facts,
        "memory_bandwidth_bytes_per_s": ceilings["bandwidth_bytes_per_s"],
        "int8_ops_per_s": ceilings["int8_ops_per_s"],
        "caches": {name: str(path) for name, path in caches.items()},
        "caches_writable": {name: can_write(path) for name, path in caches.items()},
        "floor": floor,
    }


def _rows(machine: MachineReport, floor: FloorReport | None) -> list[tuple[str, str]]:
    from gapless.doctor import versions

    c, threads = machine.ceilings, format_count(machine.threads, "thread")
    reads = f"{format_si(c.bandwidth_bytes_per_s, 'B/s')} reading {format_bytes(machine.working_set_bytes)}, measured"
    if machine.memory_bytes is not None:
        reads += f"; {format_bytes(machine.memory_bytes)} installed"
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in versions().items())),
        ("processor", f"{machine.processor} ({machine.architecture})"),
        ("features", " ".join(machine.features)),
        ("kernels", f"{machine.isa} (of {', '.join(machine.isa_choices)})"),
        ("cores", f"{machine.cores_allowed} allowed of {machine.cores_present}; {threads}"),
        ("memory", reads),
        ("int8", f"{format_si(c.int8_ops_per_s, 'op/s')}, measured"),
        *((f"{name.rstrip('s')} dir", _folder(path)) for name, path in _caches(machine).items()),
    ]
    if floor is None:
        rows.append(("floor", f"run: gapless pull {DEFAULT_MODEL}"))
    else:
        least = f"{format_si(floor.floor_tpot_s, 's')} a token, {floor.floor_tokens_per_s:,.0f} tokens/s"
        rows.append(("floor", f"{floor.model}: {least} (one request, bound by {floor.bound})"))
    return rows


def _folder(path: Path) -> str:
    from gapless.doctor import can_write

    if can_write(path):
        return f"{path} (writable)"
    return f"{path} (NOT writable: set GAPLESS_CACHE to a folder of your own)"
