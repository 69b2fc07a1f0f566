"""Shared by all tests: the real model, fetched once, and quiet settings for property tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "gapless", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gapless")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The built-in model's file; fetched into the user's cache if it is not there."""
    from gapless.models.store import resolve

    return resolve("smollm2-135m")
