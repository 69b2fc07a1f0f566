"""Shared by all tests: the real model, fetched once, and settings for property tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gapless.errors import GaplessError
from gapless.models.store import resolve

_QUIET = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", _QUIET)  # GAPLESS_TEST_EXPLORE=1: other examples each time
settings.register_profile("stable", _QUIET, derandomize=True)
settings.load_profile("explore" if os.environ.get("GAPLESS_TEST_EXPLORE") == "1" else "stable")

# A shell without job control starts background jobs with Ctrl-C ignored, and children inherit that: tests that
# interrupt themselves would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
