"""``gapless pull``."""

from __future__ import annotations

import click

from gapless.cli.options import json_option, required_model_argument
from gapless.cli.output import write, write_json
from gapless.units import format_bytes


@click.command("pull")
@required_model_argument
@json_option
def command(model: str, as_json: bool) -> None:
    """Fetch a model and check that it can be read.

    MODEL is a built-in name, hf:ORG/REPO[@REVISION], hf:ORG/REPO/FILE.gguf, hf:ORG/REPO:QUANT (such as Q4_0), or a
    path.
    """
    from gapless.cli.progress import downloading
    from gapless.models.load import load_model
    from gapless.models.store import pull

    with downloading(model) as bar:
        path = pull(model, bar)
    loaded = load_model(path)
    facts = {
        "name": model,
        "path": str(path),
        "format": loaded.format,
        "family": loaded.spec.family,
        "tensor_bytes": loaded.weights_bytes,
        "context_tokens": loaded.spec.context_tokens,
    }
    if as_json:
        write_json(facts)
    else:
        write(f"{path}\n{loaded.spec.family}, {loaded.format}, {format_bytes(loaded.weights_bytes)} of tensors")
