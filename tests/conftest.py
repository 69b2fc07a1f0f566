"""Shared by all tests: the real model, fetched once, and settings for property tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gapless.errors import GaplessError
from gapless.models.store import resolve

_QUIET = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _QUIET)
settings.register_profile("ci", _QUIET, derandomize=True)  # the same examples each time
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The built-in model's file, in the user's cache; fetched if it is not there (workers wait for one another).

    Fails where it cannot be fetched. With ``GAPLESS_TEST_OFFLINE=1`` the tests that need it are left out instead.
    """
    offline = os.environ.get("GAPLESS_TEST_OFFLINE") == "1"
    try:
        return resolve("smollm2-135m", download=not offline)
    except GaplessError as problem:
        if offline:
            pytest.skip(f"GAPLESS_TEST_OFFLINE=1: {problem}")
        pytest.fail(f"the real model cannot be had: {problem}", pytrace=False)
