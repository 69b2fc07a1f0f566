"""Writes data/real_model.npz with transformers: ``python tests/record_real_model.py FILE.gguf``.

Needs torch and transformers. The weights are those of the file, dequantised; everything is float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
import gguf_to_hf  # noqa: E402

TEXT_TOKENS = 96
PLACES = (slice(None, None, 5), slice(None, None, 61))


def main() -> None:
    source = Path(sys.argv[1])
    ids = np.random.default_rng(11).integers(100, 49_000, TEXT_TOKENS)
    # The converter rounds to BF16 for engines; the reference keeps what the file says.
    torch.bfloat16 = torch.float32  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        gguf_to_hf.convert(source, Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits = model(torch.tensor(ids[None])).logits[0].numpy()
    np.savez_compressed(ROOT / "tests" / "data" / "real_model.npz", ids=ids, logits=logits[PLACES])


if __name__ == "__main__":
    main()
