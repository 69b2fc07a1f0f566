"""``gapless demo``."""

from __future__ import annotations

import time
from typing import Any

import click

from gapless.cli.options import DEFAULT_MODEL, EngineOptions, engine_options, json_option
from gapless.cli.output import note, write_json
from gapless.units import format_si

QUESTIONS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a short poem about waiting.",
    "What does a CPU cache do?",
)
MAX_TOKENS = 120


@click.command("demo")
@engine_options
@json_option
def command(engine: EngineOptions, as_json: bool) -> None:
    """Fetch the default model, answer three questions at once, and say what limits the speed."""
    from gapless.arch.sizes import weight_infos
    from gapless.cli.panes import open_panes
    from gapless.doctor import decode_work, measure_ceilings
    from gapless.machine import allowed_cores
    from gapless.outputs import StreamPiece
    from gapless.sampling import SamplingParams

    opened = time.perf_counter()
    with engine.open(DEFAULT_MODEL) as llm:
        ready = time.perf_counter()
        panes = None if as_json else open_panes(QUESTIONS)

        def show(number: int, piece: StreamPiece) -> None:
            if panes is not None:
                panes.write(number, piece.text)

        prompts = [llm.chat_prompt([{"role": "user", "content": q}]) for q in QUESTIONS]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), on_text=show)
        seconds = time.perf_counter() - ready
        if panes is not None:
            panes.close()
        ceilings = measure_ceilings(engine.threads or allowed_cores(), llm.model.weights_bytes, engine.isa, note)
        work = decode_work(
            llm.spec, weight_infos(llm.model.weights), batch=len(QUESTIONS), context_tokens=100, kv_element_bytes=2
        )
        tokens = sum(len(o.token_ids) for o in outputs)
        floor = ceilings.floor_s(work)
        result: dict[str, Any] = {
            "model": llm.model.name,
            "load_s": ready - opened,
            "ttft_s": max(o.ttft_s or 0.0 for o in outputs),
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "step_s": llm.stats.busy_s / max(llm.stats.steps, 1),
            "floor_step_s": floor,
            "bound": ceilings.bound(work),
            "host_share": llm.stats.host_share,
            "answers": [{"question": q, "text": o.text} for q, o in zip(QUESTIONS, outputs, strict=True)],
        }
    if as_json:
        write_json(result)
    else:
        _explain(result)


def _explain(r: dict[str, Any]) -> None:
    reads = "reading the weights" if r["bound"] == "memory" else "arithmetic"
    click.echo(
        f"\n{r['tokens']} tokens for three requests at once: {r['tokens_per_s']:,.0f} tokens/s, "
        f"first token after {format_si(r['ttft_s'], 's')}; the model was ready in {format_si(r['load_s'], 's')}."
    )
    click.echo(
        f"A step took {format_si(r['step_s'], 's')}. This machine needs at least "
        f"{format_si(r['floor_step_s'], 's')} for {reads}: that is what limits it. "
        f"{100 * r['host_share']:.1f}% went to the host."
    )
    click.echo("\nTry next:")
    for line in (
        "gapless chat                                     talk with the model",
        "gapless bench --batch 32                         measure it with 32 requests at once",
        "gapless doctor                                   what this machine can do",
        "gapless generate MODEL --prompt TEXT --json      your own GGUF file or model folder",
    ):
        click.echo(f"  .venv/bin/{line}" if _in_venv() else f"  {line}")


def _in_venv() -> bool:
    from pathlib import Path

    return Path(".venv/bin/gapless").exists()
