"""``gapless demo``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gapless.cli.books import show_books
from gapless.cli.options import DEFAULT_MODEL, EngineOptions, engine_options, json_option
from gapless.cli.output import note, write, write_json
from gapless.units import format_bytes, format_count, format_si

if TYPE_CHECKING:
    from gapless.ceilings import Ceilings
    from gapless.ledger.ledger import Ledger
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

_AT_ONCE = {1: "one after the other", 2: "two at once", 3: "all at once"}
_TOKENS = {1: "one token", 2: "two tokens", 3: "three tokens"}

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
    """Fetch the default model, answer three questions at once, and say what limits the speed.

    An answer that ends in an ellipsis was cut after 160 tokens.
    """
    started = time.perf_counter()
    with engine.open(DEFAULT_MODEL) as llm:
        load_s = time.perf_counter() - started
        ceilings, ledger = _books(llm, engine)
        outputs, run = _answer(llm, show=not as_json)
        at_once = min(len(QUESTIONS), engine.max_running or len(QUESTIONS))
        result = {"model": llm.name, "load_s": load_s, "at_once": at_once, **run}
        result |= {"executor": engine.executor, "float_weights": engine.float_weights}
        result |= _floor(llm, ceilings, engine.compute_threads, at_once, run["tpot_s"])
        result["ledger"] = None if ledger is None else _settled(llm, ledger)
    result["answers"] = [
        {"question": question, "text": output.text, "finish_reason": output.finish_reason}
        for question, output in zip(QUESTIONS, outputs, strict=True)
    ]
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
        "tpot_s": _tpot_s(outputs),
        "host_share": llm.stats.host_share,
        "cores_used": cpu_s / wall_s,
    }


def _tpot_s(outputs: Sequence[RequestOutput]) -> float | None:
    """Mean time per token after the first; None where there are no such tokens."""
    answers = [output.outputs[0] for output in outputs if len(output.token_ids) > 1]
    gaps = [
        (answer.last_token_s - answer.first_token_s) / (len(answer.token_ids) - 1)
        for answer in answers
        if answer.first_token_s is not None and answer.last_token_s is not None
    ]
    return statistics.fmean(gaps) if gaps else None


def _books(llm: LLM, engine: EngineOptions) -> tuple[Ceilings, Ledger | None]:
    """What the machine can do, and a ledger of what follows if the executor keeps the time of its steps."""
    from gapless.bench import held_bytes
    from gapless.doctor import measure_ceilings

    ceilings = measure_ceilings(engine.compute_threads, held_bytes(llm), engine.isa, note)
    return ceilings, None if llm.executor.profile is None else llm.keep_books(ceilings)


def _settled(llm: LLM, ledger: Ledger) -> dict[str, Any]:
    from gapless.ledger.report import summary

    llm.settle()
    return summary(ledger)


def _floor(llm: LLM, ceilings: Ceilings, threads: int, batch: int, tpot_s: float | None) -> dict[str, Any]:
    """The least time that this machine needs for a step of ``batch`` questions, in the middle of the answers."""
    work = llm.executor.counter.count([(MAX_TOKENS // 2, 1)] * batch).total
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
    gap = "" if r["tpot_s"] is None else f", then {format_si(r['tpot_s'], 's')} a token for each request"
    write(
        f"\nSpeed: {format_count(r['tokens'], 'token')} for three requests, {_AT_ONCE[r['at_once']]}, "
        f"{r['tokens_per_s']:,.0f} tokens/s. First token after {format_si(r['ttft_s'], 's')}{gap}."
    )
    if r["executor"] == "reference":
        write("Computed by the NumPy reference, which is slow by design; the limit is that of the compiled kernels.")
    elif r["float_weights"]:
        write("Computed with float32 weights, as asked for.")
    for line in _limits(r):
        write(line)
    if r["ledger"] is not None:
        write("\nWhere the time of a token went:")
        show_books(r["ledger"], n_worst=1)
    prefix = ".venv/bin/" if Path(".venv/bin/gapless").exists() else ""
    write("\nTry next:")
    width = max(len(args) for args, _ in NEXT)
    for args, why in NEXT:
        write(f"  {prefix}gapless {args:{width}}  {why}")


def _limits(r: dict[str, Any]) -> list[str]:
    """What limits the speed, a line each: the floor, then other programs if they took much of the cores."""
    if r["bound"] == "memory":
        work = f"reads {format_bytes(r['step_bytes'])} of weights and cache"
        ceiling = f"{format_si(r['memory_bandwidth_bytes_per_s'], 'B/s')} of memory bandwidth"
    else:
        work = f"computes {format_si(r['step_flops'], 'op')}"
        ceiling = f"{format_si(r['int8_ops_per_s'], 'op/s')} of int8 arithmetic"
    took = "" if r["tpot_s"] is None else f" It took {r['tpot_s'] / r['floor_tpot_s']:.1f} times that;"
    lines = [
        f"Limit: a step of {_TOKENS[r['at_once']]} {work}; the {ceiling} measured here allow it in "
        f"{format_si(r['floor_tpot_s'], 's')}.{took} {100 * r['host_share']:.1f}% of the time was spent outside "
        "the kernels."
    ]
    missing = 1 - r["cores_used"] / r["threads"]
    if missing > BUSY_ELSEWHERE and r["executor"] == "cpu":
        lines.append(f"Something else held the cores for {100 * missing:.0f}% of the time: a quiet machine is faster.")
    return lines
