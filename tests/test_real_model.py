"""The real model's logits against transformers (recorded by ``record_real_model.py``; float32, same weights)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gapless.executor.cpu import CpuExecutor
from gapless.models.load import load_model

PLACES = (slice(None, None, 5), slice(None, None, 61))

pytestmark = pytest.mark.xdist_group("real-model")


def test_float_logits_agree_with_transformers(real_model: Path) -> None:
    with np.load(Path(__file__).parent / "data" / "real_model.npz") as recorded:
        ids, wanted = recorded["ids"].tolist(), recorded["logits"]
    model = load_model(real_model)
    executor = CpuExecutor(
        model.spec, model.weights, n_pages=16, n_slots=4, max_step_tokens=64, kv_dtype="f32", float_weights=True
    )
    logits = executor.logits(ids)[PLACES]
    executor.close()
    assert np.abs(logits - wanted).max() < 1e-3
