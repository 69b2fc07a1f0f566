"""``gapless generate``."""

from __future__ import annotations

from typing import Any

import click

from gapless.cli.options import (
    EngineOptions,
    engine_options,
    json_option,
    model_argument,
    read_prompts,
    sampling_options,
)
from gapless.cli.output import printable, write_json
from gapless.outputs import Completion, RequestOutput, StreamPiece
from gapless.sampling import SamplingParams


@click.command("generate")
@model_argument
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to go on from (repeatable).")
@click.option("--prompt-file", "files", multiple=True, metavar="PATH", help="The same from a file; - is stdin.")
@click.option("--chat", is_flag=True, help="Put each prompt as a question, in the model's chat format.")
@sampling_options(max_tokens=256)
@engine_options
@json_option
def command(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    chat: bool,
    sampling: SamplingParams,
    engine: EngineOptions,
    as_json: bool,
) -> None:
    """Go on from one prompt or several, all at once."""
    texts = read_prompts(prompts, files)
    with engine.open(model) as llm:
        asked = [llm.chat_prompt([{"role": "user", "content": text}]) if chat else text for text in texts]
        live = not as_json and len(texts) == 1 and sampling.n == 1
        outputs = llm.generate(asked, sampling, on_text=_show if live else None)
    if as_json:
        objects = [_object(output, completion) for output in outputs for completion in output.outputs]
        write_json(objects[0] if len(objects) == 1 else objects)
    elif live:
        click.echo()
    else:
        _print_all(outputs)


def _show(_: int, piece: StreamPiece) -> None:
    click.echo(printable(piece.text), nl=False)


def _print_all(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs, 1):
        for completion in output.outputs:
            sample = f".{completion.index + 1}" if len(output.outputs) > 1 else ""
            click.echo(f"[{number}{sample}] {printable(completion.text)}\n")


def _object(output: RequestOutput, completion: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "index": completion.index,
    }
    if completion.logprobs is not None:
        found["logprobs"] = [
            {"logprob": p.chosen, "top": [{"token_id": i, "logprob": x} for i, x in zip(p.top_ids, p.top, strict=True)]}
            for p in completion.logprobs
        ]
    return found
