"""``gapless.bench``: what a figure is of, and batches that cannot be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gapless.bench import _Clock, _summary, benchmark, run_once
from gapless.ceilings import Ceilings
from gapless.engine import EngineStats
from gapless.errors import RequestError
from gapless.llm import LLM
from tiny_gguf import write_gguf

FAST = Ceilings(1e15, 1e15, 1e15)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", "smollm2", "Q4_0")
    with LLM(path, threads=1, kv_memory_bytes=1 << 18, max_running=4, max_step_tokens=16) as llm:
        yield llm


def clock(steps: Sequence[int]) -> _Clock:
    """A request with a token in each of these steps, which are those of the time ``step ** 2``."""
    found = _Clock(EngineStats())
    found.steps, found.times = list(steps), [float(step**2) for step in steps]
    return found


def landed(last: int) -> dict[int, float]:
    return {step: float(step**2) for step in range(last + 1)}


def test_decoding_is_measured_while_every_request_decodes() -> None:
    run = _summary([clock(range(1, 8)), clock(range(3, 10))], landed(9), 0.0, 20, 0.0)
    assert run.prefill_tokens_per_s == 20 / 9
    assert run.tpot_s == (7**2 - 3**2) / 4, "steps 4 to 7"
    assert run.decode_tokens_per_s == 2 / run.tpot_s
    assert run.request_tpot_s == ((49 - 1) / 6 + (81 - 9) / 6) / 2
    assert (run.decode_s, run.decode_tokens) == (81 - 9, 4 + 6)


def test_requests_that_never_decode_together_have_no_rate() -> None:
    for clocks in ([clock([1, 2]), clock([2, 3])], [clock([1, 2]), clock([5, 6])], [clock([3])]):
        run = _summary(clocks, landed(6), 0.0, 20, 0.0)
        assert (run.tpot_s, run.decode_tokens_per_s) == (0, 0)


def test_shares_are_of_the_higher_ceilings(llm: LLM) -> None:
    """Another program that takes the machine from one measurement does not lower the ceiling."""
    measured = iter([Ceilings(1e3, 5e6, 1e6), Ceilings(2e3, 4e6, 1e6)])
    found = measure(llm, batch=1, ceilings=lambda: next(measured))
    assert (found["memory_bandwidth_bytes_per_s"], found["int8_ops_per_s"]) == (2e3, 5e6)


def measure(llm: LLM, *, batch: int, ceilings: Any = lambda: FAST, prompt: int = 8, output: int = 6) -> dict[str, Any]:
    return benchmark(llm, batch=batch, prompt_tokens=prompt, output_tokens=output, runs=1, measure=ceilings)


def test_rate_and_time_agree(llm: LLM) -> None:
    found = measure(llm, batch=4)
    assert found["decode_tokens_per_s"] * found["tpot_s"] == pytest.approx(4)
    assert found["floor_share"] == pytest.approx(found["floor_tpot_s"] / found["tpot_s"])
    assert 0 < found["floor_share"] < 1


def test_answers_too_short_to_meet_have_no_rate(llm: LLM) -> None:
    found = measure(llm, batch=4, prompt=40, output=2)
    assert found["tpot_s"] is found["floor_share"] is found["spread"]["tpot_s"] is None
    assert found["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("batch", "prompt", "output", "message"),
    [
        (5, 8, 4, "batch = 5 is more than the 4 requests that run at once; lower it or raise max-running"),
        (4, 240, 10, r"do not fit the cache together: it holds \d+ pages .* raise kv-memory to 1MB"),
        (1, 10**6, 4, "shorten the prompt; the model has no longer context"),
        (1, 200, 100, "output-tokens = 300 exceeds the context of 256; lower them; the model has no longer context"),
    ],
)
def test_batches_that_cannot_run_together(llm: LLM, batch: int, prompt: int, output: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        measure(llm, batch=batch, prompt=prompt, output=output)


def test_a_batch_that_just_fits_runs_together(llm: LLM) -> None:
    """Whatever is let through decodes together: no request waits for the pages of another."""
    page = llm.executor.capacity.page_tokens
    for n_prompt in range(page * 3, page * 40, page // 2 - 1):
        try:
            run = run_once(llm, [[5 + i] * n_prompt for i in range(4)], 40)
        except RequestError:
            break
        assert run.tpot_s > 0
    else:
        pytest.fail("nothing was refused")
