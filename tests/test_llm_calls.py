"""Calls of the Python interface on a small model: interruptions, scoring, closing, the size of the cache."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families import make_hf_folder
from gapless.errors import (
    ExecutorError,
    GaplessError,
    ModelError,
    ModelFileError,
    RequestError,
    ResourceError,
    UnsupportedModelError,
)
from gapless.executor.open import cache_pages
from gapless.llm import LLM
from gapless.models.load import load_model
from gapless.outputs import RequestOutput, StreamPiece
from gapless.sampling import SamplingParams
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, ignore_eos=True)
PROMPT = list(range(60, 100))
WAIT_S = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("calls") / "tiny.gguf", "smollm2", "Q4_0")


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def llm(tiny: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny, threads=1, depth=request.param, kv_memory_bytes=1 << 24) as llm:
        yield llm


def wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + WAIT_S
    while llm.engine.has_work:
        assert time.monotonic() < deadline, "a request was left behind"
        time.sleep(0.001)
    llm.scheduler.check()


def test_ctrl_c_ends_a_call_and_nothing_else(llm: LLM) -> None:
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids
    done: list[list[int]] = []
    other = threading.Thread(target=lambda: done.append(llm.generate([PROMPT] * 40, GREEDY)[39].token_ids))

    def interrupt(number: int, piece: StreamPiece) -> None:
        if not other.ident:
            other.start()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 80, LONG, on_text=interrupt)
    other.join()
    wait_until_idle(llm)
    assert done == [expected]
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == expected


def test_ctrl_c_reaches_a_call_that_waits(llm: LLM) -> None:
    deadline = time.monotonic() + WAIT_S

    def generate_for_long() -> None:
        while time.monotonic() < deadline:
            llm.generate([PROMPT] * 30, LONG)

    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        generate_for_long()
    timer.join()
    wait_until_idle(llm)
    assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 12


def test_scoring_leaves_no_trace_in_the_cache(llm: LLM) -> None:
    """It writes over pages that the prefix tree knows, also while requests run."""
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids
    text = [7] * 100
    scores = llm.score(text)
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == expected
    whole = llm.generate([PROMPT], LONG)[0].token_ids
    pieces = llm.stream(PROMPT, LONG)
    found = list(next(pieces).token_ids)
    for _ in range(3):
        assert llm.score(text) == scores
        found += next(pieces).token_ids
    found += [token for piece in pieces for token in piece.token_ids]
    assert found == whole


def test_scoring_what_cannot_be_scored(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id"):
        llm.score([10**6])
    with pytest.raises(RequestError, match="5000 tokens"):
        llm.score([1] * 5000)
    with pytest.raises(RequestError, match="token_ids has no tokens to score; give at least one"):
        llm.score([])
    assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 12


def test_streams_that_are_cancelled(llm: LLM) -> None:
    async def read() -> None:
        async for _ in llm.astream(PROMPT, LONG):
            pass

    async def cancel() -> None:
        tasks = [asyncio.create_task(read()) for _ in range(5)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancel())
    wait_until_idle(llm)


def test_many_prompts_and_samples_at_once(llm: LLM) -> None:
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids
    outputs = llm.generate([PROMPT] * 100, [SamplingParams(temperature=0, max_tokens=12, n=2, ignore_eos=True)] * 100)
    assert all(c.token_ids == expected for output in outputs for c in output.outputs)
    assert [c.index for c in outputs[0].outputs] == [0, 1]
    assert outputs[0].ttft_s is not None
    assert outputs[0].ttft_s > 0


def test_text_is_the_same_however_it_is_collected(llm: LLM) -> None:
    plain = llm.generate([PROMPT], GREEDY)[0]
    watched = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=("\0\0",)))[0]
    pieces: list[StreamPiece] = []
    live = llm.generate([PROMPT], GREEDY, on_text=lambda _, piece: pieces.append(piece))[0]
    assert plain.text == watched.text == live.text == "".join(p.text for p in pieces)
    assert [t for p in pieces for t in p.token_ids] == plain.token_ids


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_closed_model_says_so(tiny: Path) -> None:
    llm = LLM(tiny, threads=1, kv_memory_bytes=1 << 24)
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    llm.close()
    llm.close()
    assert [p.finish_reason for p in stream][-1] == "abort"
    for use in (lambda: llm.generate([PROMPT]), lambda: list(llm.stream(PROMPT)), lambda: llm.score(PROMPT)):
        with pytest.raises(ExecutorError, match="closed"):
            use()


def test_a_failed_step_is_raised(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny, threads=1, kv_memory_bytes=1 << 24) as llm:
        expected = llm.generate([PROMPT], GREEDY)[0].token_ids
        land = llm.executor.land

        def fail() -> None:
            land()
            raise ExecutorError("logits are not finite", "check the weights")

        monkeypatch.setattr(llm.executor, "land", fail)
        with pytest.raises(ExecutorError, match="not finite"):
            llm.generate([PROMPT, PROMPT], GREEDY)
        with pytest.raises(ExecutorError, match="not finite"):
            list(llm.stream(PROMPT, GREEDY))
        monkeypatch.undo()
        assert llm.generate([PROMPT], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_a_lowered_context_is_kept_to(tiny: Path, executor: str) -> None:
    with LLM(tiny, executor=executor, threads=1, context_tokens=48, max_running=2) as llm:  # type: ignore[arg-type]
        assert len(llm.generate([PROMPT], LONG)[0].token_ids) == 8
        with pytest.raises(RequestError, match="48 tokens and the context holds 48"):
            llm.generate([[5] * 48])


def test_remedies_for_a_prompt_that_is_too_long(tiny: Path) -> None:
    """Each names what would help, and no more."""
    for options, remedy in (
        ({"context_tokens": 48}, "shorten the prompt, or raise the context"),
        ({"kv_memory_bytes": 1 << 16}, "shorten the prompt, or raise kv-memory"),
        ({}, "shorten the prompt; the model has no longer context"),
    ):
        with LLM(tiny, threads=1, max_running=2, **options) as llm, pytest.raises(RequestError) as caught:  # type: ignore[arg-type]
            llm.generate([[5] * 5000])
        assert caught.value.remedy == remedy


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ("high", "priority = 'high' is not a whole number"), (None, "priority = None"), (1.5, "priority = 1.5"),
        (True, "priority = True"), (10**30, "is too large"), ([1, "x"], "priority = 'x'"), ([1], "1 priorities for 2"),
        ({1: 2}, "priority = {1: 2}"),
    ],
)  # fmt: skip
def test_priorities_that_are_none(tiny: Path, policy: str, priority: object, message: str) -> None:
    """They are refused whatever the policy makes of them, and the model goes on."""
    with LLM(tiny, threads=1, kv_memory_bytes=1 << 20, policy=policy) as llm:
        with pytest.raises(RequestError, match=re.escape(message)):
            llm.generate([PROMPT, PROMPT], GREEDY, priority=priority)  # type: ignore[arg-type]
        assert len(llm.generate([PROMPT], GREEDY, priority=np.int64(3))[0].token_ids) == 12  # type: ignore[arg-type]


def test_a_priority_for_each_prompt(tiny: Path) -> None:
    ended: list[int] = []

    def note(number: int, piece: StreamPiece) -> None:
        if piece.finish_reason is not None:
            ended.append(number)

    with LLM(tiny, threads=1, kv_memory_bytes=1 << 20, policy="priority", max_running=1) as llm:
        llm.generate([PROMPT] * 3, GREEDY, on_text=note, priority=[-1, 5, 2])
    assert ended == [1, 2, 0]


# --- what is left open, dropped or forked


def in_a_process(tiny: Path, text: str, *, code: int = 0) -> str:
    """Run lines after ``llm`` has been opened, in a Python of their own."""
    opening = f"llm = LLM({str(tiny)!r}, threads=2, kv_memory_bytes=1 << 24)"
    lines = ["import gc, os, sys, threading", "from gapless import LLM, SamplingParams", opening, textwrap.dedent(text)]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr or code != 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "left",
    [
        "stream = llm.stream([70, 71]); next(stream)",
        "streams = [llm.stream([70, 71]) for _ in range(3)]; [next(s) for s in streams]; del llm",
        "cycle = [llm.stream([70, 71])]; cycle.append(cycle); next(cycle[0]); del cycle",
        "sys.answers = llm.stream([70, 71]); next(sys.answers); sys.llm = llm",
        "llm.generate([[70, 71]], SamplingParams(max_tokens=3))",
        "pass",
    ],
)
def test_a_program_ends_whatever_it_leaves_open(tiny: Path, left: str) -> None:
    in_a_process(tiny, left)


def test_a_model_that_is_dropped_ends_its_threads(tiny: Path) -> None:
    in_a_process(
        tiny,
        """
        import time
        def ours():
            return [t.name for t in threading.enumerate() if t.name.startswith("gapless")]
        llm.generate([[70, 71]], SamplingParams(max_tokens=3))
        assert len(ours()) == 2, ours()
        del llm
        gc.collect()
        deadline = time.monotonic() + 30
        while ours():
            assert time.monotonic() < deadline, ours()
            time.sleep(0.01)
        """,
    )


class CollectsWhileHeld(deque[object]):
    """Where commands are kept: the collector runs as they are put there."""

    def extend(self, commands: Iterable[object]) -> None:
        gc.collect()
        super().extend(commands)


@pytest.mark.parametrize("where", ["on the engine's thread", "while another is submitted"])
def test_a_stream_may_be_collected_anywhere(tiny: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The collector closes what lies in a cycle on whatever thread it runs on: that must wait for nobody."""

    def leave_in_a_cycle() -> None:
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        cycle: list[object] = [stream]
        cycle.append(cycle)

    answers: list[RequestOutput] = []
    llm = LLM(tiny, threads=1, kv_memory_bytes=1 << 24)
    commit = llm.scheduler.commit
    gc.disable()
    try:
        leave_in_a_cycle()
        if where == "on the engine's thread":
            monkeypatch.setattr(llm.scheduler, "commit", lambda result: (gc.collect(), commit(result))[1])
        else:
            monkeypatch.setattr(llm.engine, "_commands", CollectsWhileHeld(llm.engine._commands))
        asking = threading.Thread(target=lambda: answers.extend(llm.generate([PROMPT], GREEDY)), daemon=True)
        asking.start()
        asking.join(WAIT_S)
    finally:
        gc.enable()
    assert len(answers) == 1, "it waits for ever"
    wait_until_idle(llm)
    llm.close()


def test_an_error_keeps_no_model_alive(tiny: Path) -> None:
    """Whatever is raised of a closed model: neither it nor the callers' frames are held afterwards."""

    class Local:
        """Something of a caller's."""

    def use() -> tuple[weakref.ref[LLM], weakref.ref[Local]]:
        llm, local = LLM(tiny, threads=1, kv_memory_bytes=1 << 20), Local()
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        llm.close()
        for _ in range(3):
            with pytest.raises(ExecutorError, match="closed") as caught:
                llm.generate([PROMPT])
            assert len(traceback.extract_tb(caught.value.__traceback__)) < 10
            with pytest.raises(ExecutorError, match="closed"):
                llm.engine.submit(PROMPT, GREEDY, [])
        return weakref.ref(llm), weakref.ref(local)

    model, local = use()
    gc.collect()
    assert model() is local() is None


def test_a_forked_process_is_told_and_ends(tiny: Path) -> None:
    found = in_a_process(
        tiny,
        """
        import warnings
        warnings.simplefilter("ignore")
        from gapless.errors import ExecutorError
        stream = llm.stream([70, 71])
        next(stream)
        child = os.fork()
        if child == 0:
            for use in (lambda: llm.generate([[70, 71]]), lambda: list(stream), lambda: llm.score([70, 71])):
                try:
                    use()
                except ExecutorError as problem:
                    print("refused" if "fork" in str(problem) or "gone" in str(problem) else problem, flush=True)
            llm.close()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        stream.close()
        print(len(llm.generate([[70, 71]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
        """,
    )
    assert found.split() == ["refused", "refused", "refused", "3"]


# --- damaged weights


@pytest.mark.parametrize("executor", ["cpu", "reference"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(seed=1, max_tokens=4, logprobs=2)], ids=["greedy", "drawn"]
)
def test_weights_that_are_no_numbers_are_no_answer(tmp_path: Path, executor: str, sampling: SamplingParams) -> None:
    """The scales of a quantised matrix are NaN: every score is, and "!!!!" is not what the model says."""
    path = write_gguf(tmp_path / "damaged.gguf", "smollm2", "Q8_0")
    tensor = load_model(path).weights.layers[0].down
    data = bytearray(path.read_bytes())
    begin = data.index(tensor.data.tobytes())
    data[begin : begin + tensor.nbytes] = b"\xff" * tensor.nbytes
    path.write_bytes(data)
    options = {"threads": 1, "kv_memory_bytes": 1 << 24} if executor == "cpu" else {}
    with LLM(path, executor=executor, **options) as llm, pytest.raises(ModelError, match="finite"):  # type: ignore[arg-type]
        llm.generate([PROMPT, PROMPT], sampling)


# --- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads = 0"), ({"depth": 0}, "depth = 0"), ({"max_running": 0}, "max_running = 0"),
        ({"context_tokens": 1}, "context_tokens = 1"), ({"max_step_tokens": 1}, "max_step_tokens = 1"),
        ({"context_tokens": 128, "kv_memory_bytes": 1 << 14}, "context = 128 tokens"),
        ({"threads": "2"}, "threads = '2'"), ({"threads": 10**9}, "threads = 1000000000 is too large"),
        ({"kv_memory_bytes": 1e9}, "kv_memory_bytes = 1000000000.0 is not a whole number"), ({"depth": 10**6}, "depth"),
        ({"max_running": None}, "max_running = None"), ({"max_step_tokens": 10**400}, "max_step_tokens = 1000"),
        ({"kv_dtype": "f8"}, "kv_dtype = 'f8'"), ({"isa": "mmx"}, "isa = 'mmx'"), ({"isa": []}, "isa = []"),
        ({"executor": "gpu"}, "executor = 'gpu'"), ({"policy": "lifo"}, "policy = 'lifo'"), ({"policy": []}, "policy"),
        ({"float_weights": "yes"}, "float_weights = 'yes'"), ({"prefix_cache": 1}, "prefix_cache = 1"),
        ({"executor": "reference", "isa": "portable"}, "isa = 'portable' is not for the reference"),
        ({"executor": "reference", "kv_dtype": "q8"}, "kv_dtype = 'q8' is not for the reference"),
    ],
)  # fmt: skip
def test_arguments_that_are_wrong(tiny: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(GaplessError, match=re.escape(message)):
        LLM(tiny, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [None, 3, b"x", ["smollm2-135m"]])
def test_a_model_that_is_no_name(model: object) -> None:
    with pytest.raises(GaplessError, match="neither a name nor a path"):
        LLM(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"text", "prompts = b'text'"), (3, "prompts = 3"), (None, "prompts = None"), ({"a": 1}, "prompts = {'a': 1}"),
        (["a", 3], "prompts[1] = 3"), ([[1, 2], b"x"], "prompts[1] = b'x'"), ([True, False], "= True is not a whole"),
        ([[1, 2.5]], "= 2.5 is not a whole number"), ([["a"]], "= 'a' is not"), ([[10**6]], "the token id 1000000"),
        ([[-1]], "the token id -1"), ([[10**400]], "too large"), ([[]], "no tokens"), ([[[1]]], "= [1] is not"),
    ],
)  # fmt: skip
def test_prompts_that_are_none(llm: LLM, prompts: object, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 3, b"abc", {5: 1}, {5, 6}, np.array(5), [[5]], [1.5], ["a"]])
def test_whatever_takes_a_prompt_refuses_what_is_none(llm: LLM, prompt: Any) -> None:
    async def astream() -> None:
        async for _ in llm.astream(prompt):
            pass

    for use in (
        lambda: llm.generate(["a", prompt]), lambda: llm.stream(prompt), lambda: asyncio.run(astream()),
        lambda: llm.score(prompt),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            use()


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_what_cannot_be_scored_on_either_executor(tiny: Path, executor: str) -> None:
    with LLM(tiny, executor=executor, threads=1, max_running=2) as llm:  # type: ignore[arg-type]
        for ids, message in (
            ([], "no tokens to score"), ("", "no tokens to score"),
            ([1] * 257, "257 tokens and the context holds 256; score them in parts; the model has no longer context"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=message):
                llm.score(ids)  # type: ignore[arg-type]
        assert len(llm.score([1] * 256)) == 255


def test_prompts_may_be_arrays(llm: LLM) -> None:
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids
    for prompts in (np.array(PROMPT), np.array([PROMPT], np.int32), tuple(PROMPT), [np.int64(i) for i in PROMPT]):
        assert [o.token_ids for o in llm.generate(prompts, GREEDY)] == [expected]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "params = {} is no"), ("greedy", "params = 'greedy'"), (3, "params = 3"), ([None], "params has None"),
        (SamplingParams(stop_token_ids=tuple(range(320)), min_tokens=1), "stop_token_ids has all ids"),
        ([GREEDY, GREEDY], "2 params for 1 prompts"), (SamplingParams(stop_token_ids=(10**6,)), "token id 1000000"),
        (SamplingParams(logit_bias={10**6: 1.0}), "logit_bias has the token id 1000000"),
    ],
)  # fmt: skip
def test_params_that_are_none(llm: LLM, params: object, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.generate([PROMPT], params)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "x"}, ["hello"], [None], [], ()])
def test_messages_that_are_no_conversation(llm: LLM, messages: object) -> None:
    with pytest.raises(RequestError, match="messages = "):
        llm.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({}, "role = None"), ({"content": "a"}, "role = None"), ({"role": "user"}, "content = None"),
        ({"role": "user", "content": 3}, "content = 3"), ({"role": 1, "content": "a"}, "role = 1"),
    ],
)  # fmt: skip
def test_messages_that_lack_something(llm: LLM, message: dict[str, Any], problem: str) -> None:
    good = {"role": "user", "content": "a"}
    with pytest.raises(RequestError, match=rf"messages\[1\]\.{problem} is no text"):
        llm.chat_prompt([good, message])
    assert llm.chat_prompt(iter([good])) == llm.chat_prompt((good,)) == llm.chat_prompt([good])  # type: ignore[arg-type]


def test_a_tokenizer_that_knows_more_than_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids would be looked up behind the end of the embedding."""
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **_: [5, llm.spec.vocab_size])
    for use in (
        lambda: llm.generate(["a"]),
        lambda: next(llm.stream("a")),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(RequestError, match="token id"):
            use()


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose tokenizer fails at the text of every token of one letter, and so of all that are not special."""
    folder = make_hf_folder("smollm2", tmp_path_factory.mktemp("failing") / "model")
    path = folder / "tokenizer.json"
    dots = {"type": "Replace", "pattern": {"Regex": "."}, "content": "."}
    strip = {"type": "Strip", "content": ".", "start": 1, "stop": 1}
    changed = {"decoder": {"type": "Sequence", "decoders": [dots, strip]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with LLM(folder, threads=1, kv_memory_bytes=1 << 24) as llm:
        yield llm


@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("way", ["whole", "live", "stop", "stream", "astream"])
def test_a_tokenizer_that_fails_at_the_answer_fails_that_request_only(failing: LLM, way: str, n_tokens: int) -> None:
    special = SamplingParams(max_tokens=n_tokens, ignore_eos=True, logit_bias={256: 1000.0})
    bad = replace(special, logit_bias={65: 1000.0}, stop=("x",) if way == "stop" else ())

    async def last() -> None:
        async for _ in failing.astream(PROMPT, bad):
            pass

    ways = {
        "whole": lambda: failing.generate([PROMPT], bad),
        "stop": lambda: failing.generate([PROMPT], bad),
        "live": lambda: failing.generate([PROMPT], bad, on_text=lambda *_: None),
        "stream": lambda: list(failing.stream(PROMPT, bad)),
        "astream": lambda: asyncio.run(last()),
    }
    good: list[str | None] = []
    beside = threading.Thread(
        target=lambda: good.extend(r.finish_reason for r in failing.generate([PROMPT] * 3, special, on_text=print))
    )
    beside.start()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: the tokenizer cannot make text of tokens"):
        ways[way]()
    beside.join(WAIT_S)
    assert good == ["length"] * 3
    wait_until_idle(failing)
    assert failing.generate([PROMPT], special)[0].finish_reason == "length"


@pytest.mark.parametrize("unit", ["a", "word "])
def test_a_text_that_is_far_too_long_is_refused_before_it_is_encoded(llm: LLM, unit: str) -> None:
    text = unit * 2_000_000
    message = (
        rf"the prompt has \d+ characters, which make more tokens than the {llm.spec.context_tokens} of the context"
    )
    for use in (
        lambda: llm.generate(["a", text]),
        lambda: next(llm.stream(text)),
        lambda: llm.chat([{"role": "user", "content": text}]),
    ):
        started = time.process_time()
        with pytest.raises(RequestError, match=message) as caught:
            use()
        assert caught.value.remedy == "shorten the prompt; the model has no longer context"
        assert time.process_time() - started < 2


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_a_vocabulary_too_large_for_exact_sums(tiny: Path, monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    monkeypatch.setattr("gapless.executor.open.MAX_VOCAB", 100)
    with pytest.raises(UnsupportedModelError, match="use a model of at most 100"):
        LLM(tiny, executor=executor)  # type: ignore[arg-type]


def pages(
    context_tokens: int | None = None, *, memory: int | None = None, available: int = 10**12, model_context: int = 8192
) -> int:
    """Of 1,000 bytes, for a model of 8,192 tokens and 64 requests at once."""
    return cache_pages(
        1000, model_context=model_context, context_tokens=context_tokens, max_running=64, kv_memory_bytes=memory,
        available=available,
    )  # fmt: skip


def test_the_cache_has_room_for_what_is_likely() -> None:
    assert pages() == 64 * 128, "64 requests of 2,048 tokens"
    assert pages(1024) == 64 * 64
    assert pages(8192) == 64 * 128
    assert pages(available=4_000_000) == 1000, "a quarter of the memory"
    assert pages(8192, available=4_000) == 512, "the context that was asked for, whatever it takes"
    assert pages(100_000, available=4_000) == 512, "no more than the model's"
    assert pages(available=0) == 4
    assert pages(available=10**12, model_context=1 << 31) == 1 << 16, "a claim makes no room beyond a million tokens"
    assert pages(memory=10_500) == 10
    with pytest.raises(ResourceError, match="512000 bytes of cache and kv-memory = 10500"):
        pages(8192, memory=10_500)
