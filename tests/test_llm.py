"""The Python interface on the real model: answers, streams, and tokens that depend on nothing but the request."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gapless.errors import GaplessError, ModelError, RequestError, ResourceError
from gapless.llm import LLM
from gapless.sampling import SamplingParams

pytestmark = pytest.mark.xdist_group("real-model")

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PAGE_BYTES = 16 * 3 * 2 * 64 * 2 * 30


@pytest.fixture(scope="module")
def llm(real_model: Path) -> Iterator[LLM]:
    with LLM(real_model, kv_memory_bytes=600 * PAGE_BYTES) as llm:
        yield llm


def different_prompts(n: int) -> list[list[int]]:
    """Prompts of 3 to 90 tokens, some of which begin alike."""
    rng = random.Random(7)
    common = [rng.randrange(100, 40_000) for _ in range(60)]
    prompts = []
    for i in range(n):
        own = [rng.randrange(100, 40_000) for _ in range(rng.randint(3, 30))]
        prompts.append([*common[: rng.choice((0, 0, 33, 60))], i + 100, *own])
    return prompts


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The greedy tokens of 64 prompts, one after the other."""
    return [llm.generate([p], GREEDY)[0].token_ids for p in different_prompts(64)]


def tokens_of(llm: LLM, max_tokens: int = 12) -> list[list[int]]:
    """The first of the tokens that all prompts together get."""
    outputs = llm.generate(different_prompts(64), replace(GREEDY, max_tokens=max_tokens))
    return [output.token_ids[:12] for output in outputs]


def test_64_prompts_together_are_as_alone(llm: LLM, alone: list[list[int]]) -> None:
    assert len({tuple(t) for t in alone}) > 40, "the prompts ask for different answers"
    assert tokens_of(llm) == alone


def test_64_prompts_from_a_warm_prefix_cache(llm: LLM, alone: list[list[int]]) -> None:
    tokens_of(llm)
    assert llm.scheduler.cache.match(different_prompts(64)[1], 10**6), "nothing is cached"
    assert tokens_of(llm) == alone


@pytest.mark.parametrize(
    "options",
    [
        {"max_step_tokens": 5, "max_running": 5, "threads": 1},
        {"max_step_tokens": 64, "prefix_cache": False, "threads": 2},
        {"kv_memory_bytes": 24 * PAGE_BYTES, "max_running": 16},
        {"depth": 2},
    ],
    ids=["tiny chunks", "no prefix cache", "forced preemption", "two steps in flight"],
)
def test_64_prompts_under_other_circumstances(
    real_model: Path, alone: list[list[int]], options: dict[str, object]
) -> None:
    with LLM(real_model, **{"kv_memory_bytes": 600 * PAGE_BYTES, **options}) as other:  # type: ignore[arg-type]
        # Admission leaves every answer some room to grow: it takes long ones to outgrow the cache.
        assert tokens_of(other, 60 if "kv_memory_bytes" in options else 12) == alone
        assert ("kv_memory_bytes" in options) == (other.scheduler.n_preemptions > 0)


def test_seeds_make_the_same_tokens_whatever_runs_beside(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=s, max_tokens=10) for s in range(6)]
    prompts = ["The weather today"] * 6
    one_by_one = [llm.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in llm.generate(prompts, params)] == one_by_one
    assert len({tuple(t) for t in one_by_one}) > 3


def test_samples_of_a_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=8)
    first, second = (llm.generate(["Once upon a time"], params)[0] for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1


def test_it_answers(llm: LLM) -> None:
    assert llm.generate(["The capital of France is"], GREEDY)[0].text.startswith(" Paris")
    answer = llm.chat([{"role": "user", "content": "What is 2+2?"}], SamplingParams(temperature=0, max_tokens=20))
    assert "4" in answer.text
    assert answer.finish_reason == "stop"


def test_streams_carry_the_same_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    whole = llm.generate(["def fib(n):"], params)[0]
    pieces = list(llm.stream("def fib(n):", params))
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]

    async def read() -> str:
        return "".join([p.text async for p in llm.astream("def fib(n):", params)])

    async def together() -> list[str]:
        return await asyncio.gather(*(read() for _ in range(5)))

    assert asyncio.run(together()) == [whole.text] * 5


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    for _ in llm.stream("Once", SamplingParams(max_tokens=500, ignore_eos=True)):
        break

    async def leave() -> None:
        async for _ in llm.astream("Once", SamplingParams(max_tokens=5000, ignore_eos=True)):
            break

    asyncio.run(leave())
    llm.generate(["x"], SamplingParams(max_tokens=1))
    llm.generate(["x"], SamplingParams(max_tokens=1))
    assert llm.scheduler.n_running == 0


def test_a_failing_callback_ends_its_call(llm: LLM) -> None:
    def fail(number: int, piece: object) -> None:
        if number == 0:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        llm.generate(["One", "Two"], GREEDY, on_text=fail)
    assert not llm.scheduler.has_work
    assert llm.generate(["Two"], GREEDY)[0].finish_reason == "length"


def test_threads_may_generate_at_once(llm: LLM) -> None:
    wanted = llm.generate(["One", "Two", "Three"], GREEDY)
    found: dict[int, list[int]] = {}

    def work(index: int, prompt: str) -> None:
        found[index] = llm.generate([prompt], GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(i, p)) for i, p in enumerate(("One", "Two", "Three"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(3)] == [o.token_ids for o in wanted]


def test_stop_strings_and_ids(llm: LLM) -> None:
    whole = llm.generate(["Count: 1, 2, 3,"], SamplingParams(temperature=0, max_tokens=24))[0]
    stop = whole.text[6:9]
    cut = llm.generate(["Count: 1, 2, 3,"], SamplingParams(temperature=0, max_tokens=24, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    ends = whole.token_ids[4]
    by_id = llm.generate(["Count: 1, 2, 3,"], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(ends,)))[0]
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(ends) + 1]
    late = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(ends,), min_tokens=12)
    assert len(llm.generate(["Count: 1, 2, 3,"], late)[0].token_ids) >= 12


def test_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    output = llm.generate(["The capital of France is"], params)[0].outputs[0]
    assert output.logprobs is not None
    assert [p.top_ids[0] for p in output.logprobs] == output.token_ids
    prompt = llm.tokenizer.encode("The capital of France is")
    scores = llm.score([*prompt, *output.token_ids])[len(prompt) - 1 :]
    assert scores == pytest.approx([p.chosen for p in output.logprobs], abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], None, "no tokens"),
        ([1] * 9000, None, "9000 tokens"),
        ([10**6], None, "token id 1000000"),
        ([-1], None, "token id -1"),
    ],
)
def test_prompts_that_cannot_be_served(llm: LLM, prompt: list[int], params: None, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], params)
    assert not llm.scheduler.has_work


def test_models_that_cannot_be_held(real_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.models.memory.available_bytes", lambda: 50_000_000)
    with pytest.raises(ResourceError, match=r"GB of memory, 0\.05 GB are available"):
        LLM(real_model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isa": "sse9"}, "'sse9'"), ({"policy": "random"}, "'random'"), ({"executor": "tpu"}, "'tpu'"),
        ({"kv_memory_bytes": 10}, "kv-memory = 10"), ({"kv_dtype": "f8"}, "'f8'"),
    ],
)  # fmt: skip
def test_options_that_are_not_known(real_model: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(GaplessError, match=message):
        LLM(real_model, **options)  # type: ignore[arg-type]


def test_names_that_are_not_known() -> None:
    with pytest.raises(ModelError, match="did you mean smollm2-135m"):
        LLM("smollm2-153m")
