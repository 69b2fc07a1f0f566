"""The Python interface: load a model, generate, stream, chat, score."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from gapless.arch.spec import ModelSpec
from gapless.engine import Engine, EngineStats, Sink
from gapless.errors import GaplessError, RequestError
from gapless.executor.protocol import Executor
from gapless.models import store
from gapless.models.load import LoadedModel, load_model
from gapless.models.memory import available_bytes, check_memory
from gapless.outputs import Completion, RequestOutput, StreamPiece
from gapless.policy import by_name
from gapless.request import FinishReason
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler, SchedulerConfig
from gapless.step import TokenLogprobs
from gapless.text.chat import ChatTemplate
from gapless.text.stream import Detokenizer, StopStrings
from gapless.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
OnText = Callable[[int, StreamPiece], None]

DEFAULT_RUNNING = 64
DEFAULT_STEP_TOKENS = 512
DEFAULT_REQUEST_TOKENS = 2048  # that the cache is sized for, times the requests that run at once
PAGE_TOKENS = 16


class LLM:
    """A model that answers.

    Args:
        model: a built-in name, ``hf:ORG/REPO[@REVISION]``, or the path of a GGUF file or model folder.
        executor: "cpu" (compiled kernels) or "reference" (NumPy, slow).
        threads: compute threads; the cores that the process may use if None.
        isa: instruction set of the kernels; the best of the machine if None.
        kv_dtype: "f16", "f32" or "q8".
        context_tokens: longest request, prompt and answer; the model's if None.
        max_running: requests that run at once.
        kv_memory_bytes: memory of the cache; enough for ``max_running`` requests of 2,048 tokens within a quarter of
            what is available if None.
        depth: steps in flight; 1 if None.
        max_step_tokens: token budget of a step.
        policy: "fcfs" or "priority".
        float_weights: compute in float32 whatever the file has.
        prefix_cache: whether computed prefixes are found again.
        progress: told what is being compiled.
        download: told how many bytes of how many have come.

    Raises:
        GaplessError: the model cannot be found, read or held; the message names the remedy.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        executor: Literal["cpu", "reference"] = "cpu",
        threads: int | None = None,
        isa: str | None = None,
        kv_dtype: Literal["f16", "f32", "q8"] = "f16",
        context_tokens: int | None = None,
        max_running: int = DEFAULT_RUNNING,
        kv_memory_bytes: int | None = None,
        depth: int | None = None,
        max_step_tokens: int = DEFAULT_STEP_TOKENS,
        policy: str = "fcfs",
        float_weights: bool = False,
        prefix_cache: bool = True,
        progress: Callable[[str], None] | None = None,
        download: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model: LoadedModel = load_model(store.resolve(str(model), progress=download))
        self.tokenizer = Tokenizer.from_model(self.model)
        context = min(context_tokens or self.spec.context_tokens, self.spec.context_tokens)
        ordering = by_name(policy)
        self.executor: Executor
        if executor == "reference":
            self.executor = _reference(self.model, context, max_running, max_step_tokens)
        elif executor == "cpu":
            self.executor = _cpu(
                self.model, context, max_running, max_step_tokens, kv_memory_bytes, kv_dtype,
                threads=threads, isa=isa, depth=depth, float_weights=float_weights, progress=progress,
            )  # fmt: skip
        else:
            raise GaplessError(f"executor = {executor!r} is not known", "choose cpu or reference")
        config = SchedulerConfig(max_running=max_running, prefix_cache=prefix_cache)
        self._engine = Engine(self.executor, Scheduler(self.executor.capacity, ordering, config))
        self._background = _Background(self._engine)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def engine(self) -> Engine:
        """The loop behind this interface."""
        return self._engine

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises ModelError if it has none."""
        return ChatTemplate.from_model(self.model, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_text: OnText | None = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answer all prompts together.

        Args:
            prompts: texts or token ids; one or several.
            params: for all of them, or one for each.
            on_text: called with the prompt's number and each piece of text as it comes.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing is generated then.
        """
        several = _as_list(prompts)
        chosen = self._params(params, len(several))
        ids = [self._ids(prompt) for prompt in several]
        for tokens in ids:
            self.scheduler.validate(len(tokens))
        collectors = [[_Collector(self, i, s, number, on_text) for i in range(s.n)] for number, s in enumerate(chosen)]
        requests = [
            request
            for prompt, sampling, sinks in zip(ids, chosen, collectors, strict=True)
            for request in self._submit(prompt, sampling, sinks, priority)
        ]
        flat = [c for sinks in collectors for c in sinks]
        self._drive(flat, requests)
        for collector in flat:
            if collector.error is not None:
                raise collector.error
        return [
            RequestOutput(p if isinstance(p, str) else None, i, [c.completion for c in sinks])
            for p, i, sinks in zip(several, ids, collectors, strict=True)
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """Pieces of the answer as they come. Leaving the iterator aborts the request."""
        ids, sampling = self._ids(prompt), params or SamplingParams()
        self.scheduler.validate(len(ids))
        pieces: queue.SimpleQueue[StreamPiece] = queue.SimpleQueue()
        sinks = [_Collector(self, i, sampling, 0, lambda _, piece: pieces.put(piece)) for i in range(sampling.n)]
        requests = self._submit(ids, sampling, sinks, 0)
        try:
            yield from self._pump(pieces, sinks)
        finally:
            self._abort(requests, sinks)

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamPiece]:
        """``stream`` for asyncio; the steps run on a thread of their own. Cancelling aborts the request."""
        ids, sampling = self._ids(prompt), params or SamplingParams()
        self.scheduler.validate(len(ids))
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[StreamPiece] = asyncio.Queue()

        def arrived(_: int, piece: StreamPiece) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed over the stream
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        sinks = [_Collector(self, i, sampling, 0, arrived) for i in range(sampling.n)]
        requests = self._submit(ids, sampling, sinks, 0)
        self._background.wake()
        open_streams = len(sinks)
        try:
            while open_streams:
                piece = await pieces.get()
                open_streams -= piece.finish_reason is not None
                if piece.finish_reason == "error":
                    raise next(s.error for s in sinks if s.error is not None)
                yield piece
        finally:
            if open_streams:
                for request in requests:
                    self._engine.abort(request)
                self._background.wake()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        on_text: OnText | None = None,
    ) -> RequestOutput:
        """The answer to a conversation in the model's own format."""
        return self.generate([self.chat_prompt(messages)], params, on_text=on_text)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to the place of the answer."""
        return self.tokenizer.encode(self.template.render(messages), add_special=False)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each token after the first, given those before it."""
        score = getattr(self.executor, "score")  # noqa: B009
        with self._engine.driving:
            return [float(x) for x in score(token_ids)]

    def close(self) -> None:
        """Release threads and memory; idempotent."""
        self._background.close()
        self.executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * n
        if len(params) != n:
            raise RequestError(f"{len(params)} params for {n} prompts", "give one for all or one for each")
        return list(params)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = [int(i) for i in prompt]
        outside = [i for i in ids if not 0 <= i < self.spec.vocab_size]
        if outside:
            raise RequestError(
                f"the prompt has the token id {outside[0]}", f"give ids from 0 to {self.spec.vocab_size - 1}"
            )
        return ids

    def _submit(self, prompt: list[int], sampling: SamplingParams, sinks: Sequence[Sink], priority: int) -> list[int]:
        stops = frozenset(self.model.eos_ids)
        return self._engine.submit(prompt, sampling, sinks, stop_ids=stops, priority=priority)

    def _drive(self, collectors: list[_Collector], requests: list[int]) -> None:
        try:
            while not all(c.done for c in collectors):
                with self._engine.driving:
                    self._engine.step()
        except BaseException:
            self._abort(requests, collectors)
            raise

    def _pump(self, pieces: queue.SimpleQueue[StreamPiece], sinks: list[_Collector]) -> Iterator[StreamPiece]:
        while True:
            while not pieces.empty():
                yield pieces.get()
            if all(s.done for s in sinks):
                break
            with self._engine.driving:
                self._engine.step()
        for sink in sinks:
            if sink.error is not None:
                raise sink.error

    def _abort(self, requests: list[int], sinks: Sequence[_Collector]) -> None:
        if all(s.done for s in sinks):
            return
        for request in requests:
            self._engine.abort(request)
        with self._engine.driving:
            self._engine.step()


class _Collector(Sink):
    """Makes text of a request's tokens and watches for its stop strings."""

    def __init__(self, llm: LLM, index: int, sampling: SamplingParams, number: int, on_text: OnText | None) -> None:
        self.completion = Completion(index, logprobs=None if sampling.logprobs is None else [])
        self.done = False
        self.error: Exception | None = None
        self._number = number
        self._on_text = on_text
        self._sampling = sampling
        self._eos = frozenset(llm.model.eos_ids)
        self._started = time.perf_counter()
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        # Text is made as tokens come only where somebody reads it or looks for stop strings in it.
        self._live = on_text is not None or self._stops is not None
        self._tokenizer = llm.tokenizer
        self._detokenizer = Detokenizer(llm.tokenizer)
        self._unreported: list[int] = []

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        c = self.completion
        now = time.perf_counter() - self._started
        if c.first_token_s is None:
            c.first_token_s = now
        c.last_token_s = now
        c.token_ids.append(token)
        if c.logprobs is not None and logprobs is not None:
            c.logprobs.append(logprobs)
        if not self._live:
            return False
        self._unreported.append(token)
        if self.error is not None:
            return True
        return self._push(self._detokenizer.push(token), len(c.token_ids) > self._sampling.min_tokens)

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        c = self.completion
        self.error = self.error or error
        if not self._live:
            c.text = self._tokenizer.decode(c.token_ids)
        elif self._stops is None or self._stops.found is None:
            self._push(self._detokenizer.flush(), len(c.token_ids) > self._sampling.min_tokens)
            if self._stops is not None and self._stops.found is None:
                self._show(self._stops.flush())
            elif self._stops is not None:
                reason = "stop"
        c.finish_reason = reason
        self.done = True
        self._show("", reason)

    def _push(self, piece: str, may_stop: bool) -> bool:
        """Pass text on; True where a stop string has come."""
        if self._stops is None:
            self._show(piece)
        elif not may_stop:
            self._show(self._stops.flush() + piece)
        else:
            self._show(self._stops.push(piece))
        return self._stops is not None and self._stops.found is not None

    def _show(self, piece: str, reason: FinishReason | None = None) -> None:
        self.completion.text += piece
        if self._on_text is not None and (piece or reason is not None):
            tokens, self._unreported = tuple(self._unreported), []
            try:
                self._on_text(self._number, StreamPiece(self.completion.index, piece, tokens, reason))
            except Exception as problem:  # the caller's own: its request ends, the others go on
                self.error, self._on_text = problem, None


class _Background:
    """Drives the engine for streams that are awaited, on a thread that sleeps while there is nothing to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._work = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gapless-engine", daemon=True)
            self._thread.start()
        self._work.set()

    def close(self) -> None:
        self._closed = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            self._work.clear()
            while not self._closed and self._engine.has_work:
                with self._engine.driving:
                    self._engine.step()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a flat sequence of integers is one."""
    if isinstance(prompts, str):
        return [prompts]
    several = list(prompts)
    if several and all(isinstance(p, int) for p in several):
        return [[p for p in several if isinstance(p, int)]]
    return [p for p in several if not isinstance(p, int)]


def _reference(model: LoadedModel, context: int, max_running: int, max_step_tokens: int) -> Executor:
    from gapless.executor.reference import ReferenceExecutor

    pages = -(-min(context, 4096) // PAGE_TOKENS) * 4
    return ReferenceExecutor(
        model.spec, model.weights, n_pages=pages, n_slots=max_running, max_step_tokens=max_step_tokens, kv_dtype="f16"
    )


def _cpu(
    model: LoadedModel,
    context: int,
    max_running: int,
    max_step_tokens: int,
    kv_memory_bytes: int | None,
    kv_dtype: Literal["f16", "f32", "q8"],
    **options: Any,
) -> Executor:
    from gapless.executor.cpu import CpuExecutor
    from gapless.kernels.cpu.kv import page_bytes

    size = page_bytes(model.spec, kv_dtype)
    weights = model.weights_bytes
    n_pages = _cache_pages(size, context, max_running, kv_memory_bytes, available_bytes() - weights)
    check_memory(
        weights + n_pages * size, f"model {model.name!r} with its cache", "use a smaller model, context or kv-memory"
    )
    return CpuExecutor(
        model.spec,
        model.weights,
        n_pages=n_pages,
        n_slots=max_running,
        max_step_tokens=max(max_step_tokens, max_running),
        context_tokens=context,
        kv_dtype=kv_dtype,
        **options,
    )


def _cache_pages(page_bytes: int, context: int, max_running: int, wanted_bytes: int | None, available: int) -> int:
    """Pages of the cache: what was asked for, else a sensible share of the memory."""
    whole = -(-context // PAGE_TOKENS)
    if wanted_bytes is None:
        sensible = max(whole, max_running * -(-min(context, DEFAULT_REQUEST_TOKENS) // PAGE_TOKENS))
        return max(min(sensible, max(available, 0) // 4 // page_bytes), min(whole, 4))
    pages = wanted_bytes // page_bytes
    if pages < 2:
        raise GaplessError(
            f"kv-memory = {wanted_bytes} bytes holds less than two pages of {page_bytes} bytes", "raise it"
        )
    return pages
