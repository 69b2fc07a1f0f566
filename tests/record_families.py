"""Writes data/families.json and data/families.npz with transformers: ``python tests/record_families.py``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

from families import DATA, RECORDED, TINY, TOKEN_IDS, make_hf_folder, tiny_config


def main() -> None:
    DATA.mkdir(exist_ok=True)
    recorded = {name: describe(name) for name in TINY}
    (DATA / "families.json").write_text(json.dumps(recorded, separators=(",", ":")))
    logits = {name: transformers_logits(name)[RECORDED] for name in TINY}
    np.savez_compressed(DATA / "families.npz", **logits)


def describe(name: str) -> dict[str, Any]:
    """The config and the tensors that ``save_pretrained`` writes."""
    config = getattr(transformers, TINY[name][0])(**tiny_config(name))
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
            tensors = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        return {"config": json.loads((Path(folder) / "config.json").read_text()), "tensors": tensors}


def transformers_logits(name: str) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        make_hf_folder(name, Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            return model(torch.tensor([TOKEN_IDS])).logits[0].numpy()


if __name__ == "__main__":
    main()
