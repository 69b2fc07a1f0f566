"""``gapless demo``."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gapless.cli.options import DEFAULT_MODEL, EngineOptions, engine_options, json_option
from gapless.cli.output import note, write_json
from gapless.units import format_bytes, format_si

if TYPE_CHECKING:
    from gapless.llm import LLM
    from gapless.outputs import RequestOutput

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "What does a CPU cache do?",
    "Give me three tips for a good night's sleep.",
)
MAX_TOKENS = 160
# A small model repeats itself when it decodes greedily; a slight penalty keeps it from that.
SAMPLING: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.05, "max_tokens": MAX_TOKENS}
BUSY_ELSEWHERE = 0.1  # share of the cores' time from which other programs are worth a line

NEXT = (
    ("chat", "talk with the model"),
    ("bench --batch 32", "measure it with 32 requests at once"),
    ("doctor", "what this machine can do"),
    ("generate MODEL --prompt TEXT --json", "your own GGUF file or model folder"),
)


@click.command("demo")
@engine_options
@json_option
def command(engine: EngineOptions, as_json: bool) -> None:
    """Fetch the default model, answer three questions at once, and say what limits the speed."""
    started = time.perf_counter()
    with engine.open(DEFAULT_MODEL) as llm:
        load_s = time.perf_counter() - started
        outputs, run = _answer(llm, show=not as_json)
        result = {"model": llm.model.name, "load_s": load_s, **run, **_floor(llm, engine, run["tpot_s"])}
    result["answers"] = [{"question": q, "text": o.text} for q, o in zip(QUESTIONS, outputs, strict=True)]
    if as_json:
        write_json(result)
    else:
        _explain(result)


def _answer(llm: LLM, *, show: bool) -> tuple[list[RequestOutput], dict[str, Any]]:
    """The answers to all questions together, and how fast they came."""
    from gapless.cli.panes import open_panes
    from gapless.sampling import SamplingParams

    panes = open_panes(QUESTIONS) if show else None
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    started, cpu_started = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, SamplingParams(**SAMPLING), on_text=None if panes is None else panes.take)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    if panes is not None:
        panes.close()
    tokens = sum(len(output.token_ids) for output in outputs)
    return outputs, {
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s,
        "ttft_s": max(output.ttft_s or 0.0 for output in outputs),
        "tpot_s": statistics.fmean(_tpot_s(output) for output in outputs),
        "host_share": llm.stats.host_share,
        "cores_used": cpu_s / wall_s,
    }


def _tpot_s(output: RequestOutput) -> float:
    answer = output.outputs[0]
    assert answer.first_token_s is not None
    assert answer.last_token_s is not None
    return (answer.last_token_s - answer.first_token_s) / max(len(answer.token_ids) - 1, 1)


def _floor(llm: LLM, engine: EngineOptions, tpot_s: float) -> dict[str, Any]:
    """The least time that this machine needs for a step of all questions, in the middle of the answers."""
    from gapless.arch.sizes import weight_infos
    from gapless.bench import kv_element_bytes
    from gapless.doctor import decode_work, measure_ceilings
    from gapless.machine import allowed_cores

    threads = engine.threads or allowed_cores()
    ceilings = measure_ceilings(threads, llm.model.weights_bytes, engine.isa, note)
    work = decode_work(
        llm.spec, weight_infos(llm.model.weights), batch=len(QUESTIONS), context_tokens=MAX_TOKENS // 2,
        kv_element_bytes=kv_element_bytes(llm.spec, engine.kv_dtype or "f16"),
    )  # fmt: skip
    floor_s = ceilings.floor_s(work)
    return {
        "threads": threads,
        "step_bytes": work.memory_bytes,
        "step_flops": work.flops,
        "memory_bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        "int8_ops_per_s": ceilings.int8_ops_per_s,
        "floor_tpot_s": floor_s,
        "floor_share": floor_s / tpot_s if tpot_s else None,
        "bound": ceilings.bound(work),
    }


def _explain(r: dict[str, Any]) -> None:
    click.echo(
        f"\nSpeed: {r['tokens']} tokens for three requests at once, {r['tokens_per_s']:,.0f} tokens/s. First token "
        f"after {format_si(r['ttft_s'], 's')}, then {format_si(r['tpot_s'], 's')} a token for each request."
    )
    for line in _limits(r):
        click.echo(line)
    prefix = ".venv/bin/" if Path(".venv/bin/gapless").exists() else ""
    click.echo("\nTry next:")
    width = max(len(args) for args, _ in NEXT)
    for args, why in NEXT:
        click.echo(f"  {prefix}gapless {args:{width}}  {why}")


def _limits(r: dict[str, Any]) -> list[str]:
    """What limits the speed, a line each: the floor, then other programs if they took much of the cores."""
    if r["bound"] == "memory":
        work = f"reads {format_bytes(r['step_bytes'])} of weights and cache"
        ceiling = f"{format_si(r['memory_bandwidth_bytes_per_s'], 'B/s')} of memory bandwidth"
    else:
        work = f"computes {format_si(r['step_flops'], 'op')}"
        ceiling = f"{format_si(r['int8_ops_per_s'], 'op/s')} of int8 arithmetic"
    lines = [
        f"Limit: a step of three tokens {work}; the {ceiling} measured here allow it in "
        f"{format_si(r['floor_tpot_s'], 's')}. It took {r['tpot_s'] / r['floor_tpot_s']:.1f} times that; "
        f"{100 * r['host_share']:.1f}% of the time was spent outside the kernels."
    ]
    missing = 1 - r["cores_used"] / r["threads"]
    if missing > BUSY_ELSEWHERE:
        lines.append(f"Something else held the cores for {100 * missing:.0f}% of the time: a quiet machine is faster.")
    return lines
