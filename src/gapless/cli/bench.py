"""``gapless bench``."""

from __future__ import annotations

from typing import Any

import click

from gapless.cli.options import EngineOptions, engine_options, json_option, model_argument
from gapless.cli.output import note, write_json
from gapless.units import format_bytes, format_si

_POSITIVE = click.IntRange(min=1)


@click.command("bench")
@model_argument
@click.option("--batch", type=_POSITIVE, default=1, show_default=True, help="Requests that run together.")
@click.option("--prompt-tokens", type=_POSITIVE, default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--output-tokens", type=_POSITIVE, default=128, show_default=True, help="Tokens of each answer.")
@click.option("--runs", type=_POSITIVE, default=3, show_default=True, help="Runs whose medians are printed.")
@engine_options
@json_option
def command(
    model: str, batch: int, prompt_tokens: int, output_tokens: int, runs: int, engine: EngineOptions, as_json: bool
) -> None:
    """Measure a model: prefill and decode rates, times, sizes, and the floor beside them.

    Every run has fresh random prompts, so that no prefix is found in the cache.
    """
    from dataclasses import replace

    from gapless.bench import benchmark
    from gapless.doctor import measure_ceilings
    from gapless.machine import allowed_cores

    engine = replace(engine, max_running=max(engine.max_running or 64, batch))
    with engine.open(model) as llm:
        threads = engine.threads or allowed_cores()
        ceilings = measure_ceilings(threads, llm.model.weights_bytes, engine.isa, note)
        result = benchmark(
            llm, batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, runs=runs,
            kv_dtype=engine.kv_dtype or "f16", ceilings=ceilings,
        )  # fmt: skip
    if as_json:
        write_json(result)
    else:
        _print(result)


def _print(r: dict[str, Any]) -> None:
    lines = (
        ("model", f"{r['model']}, {format_bytes(r['weights_bytes'])} packed, {r['threads']} threads, {r['isa']}"),
        ("load", f"batch {r['batch']}, {r['prompt_tokens']} + {r['output_tokens']} tokens, median of {r['runs']} runs"),
        ("prefill", f"{_rate(r, 'prefill')}; first token after {format_si(r['ttft_s'], 's')}"),
        ("", _floor(r["floor_prefill_s"], "for the prompts", r["prefill_bound"], r["prefill_floor_share"])),
        ("decode", f"{_rate(r, 'decode')}; {format_si(r['tpot_s'], 's')} a token"),
        ("", _floor(r["floor_tpot_s"], "a step", r["bound"], r["floor_share"])),
        ("host", f"{100 * r['host_share']:.1f}% of the time outside the executor"),
        ("memory", f"{format_bytes(r['kv_bytes'])} cache, {format_bytes(r['peak_rss_bytes'])} peak"),
    )
    for name, text in lines:
        click.echo(f"{name:8} {text}")


def _rate(r: dict[str, Any], phase: str) -> str:
    slowest, fastest = r["spread"][f"{phase}_tokens_per_s"]
    return f"{r[f'{phase}_tokens_per_s']:,.0f} tokens/s ({slowest:,.0f} to {fastest:,.0f})"


def _floor(floor_s: float, of: str, bound: str, share: float | None) -> str:
    reached = "" if share is None else f"; {100 * share:.0f}% of that speed reached"
    return f"floor {format_si(floor_s, 's')} {of}, bound by {bound}{reached}"
