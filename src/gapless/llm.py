"""The Python interface: load a model, generate, stream, chat, score."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import numbers
import queue
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from gapless.arch.spec import ModelSpec
from gapless.ceilings import Ceilings
from gapless.checks import RANGES, flag, shown, whole
from gapless.collect import Collector
from gapless.energy import EnergyMeter
from gapless.engine import Engine, EngineStats, EngineThread
from gapless.errors import ExecutorError, GaplessError, RequestError
from gapless.executor.open import open_cpu, open_reference
from gapless.executor.protocol import Executor
from gapless.executor.timing import StepProfile
from gapless.ledger.ledger import Ledger
from gapless.models import store
from gapless.models.load import LoadedModel, load_model
from gapless.outputs import RequestOutput, StreamPiece
from gapless.policy import by_name
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler, SchedulerConfig
from gapless.text.chat import ChatTemplate
from gapless.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gapless.kernels.cpu.kv import KvDtype

Prompt = str | Sequence[int]
OnText = Callable[[int, StreamPiece], None]
Deliver = Callable[[int, StreamPiece], None]
Inbox = queue.SimpleQueue[tuple[int, StreamPiece]]

DEFAULT_RUNNING = 64
DEFAULT_STEP_TOKENS = 512


class LLM:
    """A model that answers. Its methods may be called from several threads at once; their requests run together.

    Args:
        model: a built-in name, ``hf:ORG/REPO[@REVISION]``, or the path of a GGUF file or model folder.
        executor: "cpu" (compiled kernels) or "reference" (NumPy, slow).
        threads: compute threads; the cores that the process may use if None.
        isa: instruction set of the kernels; the best of the machine if None.
        kv_dtype: "f16", "f32" or "q8".
        context_tokens: longest request, prompt and answer, up to the model's own; if None that, or what fits the cache.
        max_running: requests that run at once.
        kv_memory_bytes: memory of the cache; enough for ``max_running`` requests of 2,048 tokens within a quarter of
            what is available if None.
        depth: steps in flight; 1 if None.
        max_step_tokens: token budget of a step; raised to ``max_running`` on "cpu" where it is less.
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
        kv_dtype: KvDtype = "f16",
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
        given = {
            "threads": threads, "kv_memory_bytes": kv_memory_bytes, "context_tokens": context_tokens, "depth": depth,
            "max_running": max_running, "max_step_tokens": max_step_tokens,
        }  # fmt: skip
        count = _checked_counts(given)
        flag("float_weights", float_weights, GaplessError)
        flag("prefix_cache", prefix_cache, GaplessError)
        if not isinstance(model, str | Path):
            raise GaplessError(f"model = {shown(model)} is neither a name nor a path", "give one of them")
        ordering = by_name(policy)
        _check_executor(executor, isa=isa, kv_dtype=None if kv_dtype == "f16" else kv_dtype)
        self.name = str(model)
        self.model: LoadedModel = load_model(store.resolve(str(model), progress=download))
        self.tokenizer = Tokenizer.from_model(self.model)
        sizes = {name: count[name] for name in ("context_tokens", "max_running", "max_step_tokens")}
        self.executor: Executor
        if executor == "reference":
            self.executor = open_reference(self.model, **sizes)
        else:
            self.executor = open_cpu(
                self.model, **sizes, kv_memory_bytes=count["kv_memory_bytes"], kv_dtype=kv_dtype,
                threads=count["threads"], isa=isa, depth=count["depth"], float_weights=float_weights,
                progress=progress,
            )  # fmt: skip
        config = SchedulerConfig(
            max_running=count["max_running"], context_tokens=count["context_tokens"], prefix_cache=prefix_cache,
            model_tokens=self.model.spec.context_tokens,
        )  # fmt: skip
        try:
            self.engine = Engine(self.executor, Scheduler(self.executor.capacity, ordering, config))
            self._thread = EngineThread(self.engine)
        except BaseException:
            self.executor.close()
            raise
        # Whoever forgets to close a model gets its threads and memory back all the same.
        weakref.finalize(self, self._thread.end).atexit = False
        _open_models.add(self)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def ledger(self) -> Ledger | None:
        """The books, if they are kept."""
        return self.engine.ledger

    def keep_books(self, ceilings: Ceilings, meter: EnergyMeter | None = None) -> Ledger:
        """Begin a ledger: from now on the time of every token is booked, beside the floor that these ceilings give.

        With a meter, which stays the caller's to close, the joules too.

        Raises GaplessError where the executor's steps are not stamped.
        """
        ledger = Ledger(self.check_stamped(), self.executor.counter, ceilings, meter)
        begun = self.engine.call(lambda: setattr(self.engine, "ledger", ledger))
        self._thread.wake()
        begun.result()
        return ledger

    def settle(self) -> None:
        """Wait until nothing runs and all that ran is booked: an answer is delivered before its step has ended."""
        while True:
            with self.engine.driving:
                if not self.engine.has_work:
                    return self.engine.book()
            time.sleep(_SETTLING_S)

    def check_stamped(self) -> StepProfile:
        """What reads the stamps of steps. Raises GaplessError where they have none."""
        if self.executor.profile is None:
            raise GaplessError("the reference executor keeps no time of its steps", "use the executor cpu")
        return self.executor.profile

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

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
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answer all prompts together. Whatever interrupts it, Ctrl-C included, aborts its requests.

        Args:
            prompts: texts or token ids; one or several.
            params: for all of them, or one for each.
            on_text: called with the prompt's number and each piece of text as it comes.
            priority: for all of them, or one for each; the greatest goes first where the policy is "priority".

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing is generated then.
            ExecutorError: a step failed.
        """
        if on_text is not None and not callable(on_text):
            raise RequestError(f"on_text = {shown(on_text)} cannot be called", "give a function of two arguments")
        several = _as_list(prompts)
        ids = [self._ids(prompt) for prompt in several]
        inbox: Inbox = queue.SimpleQueue()
        call = _Call(
            self, ids, self._params(params, len(ids)), lambda *x: inbox.put(x), on_text is not None,
            _priorities(priority, len(ids)),
        )  # fmt: skip
        try:
            with contextlib.closing(self._answers(call, inbox)) as answers:
                for number, piece in answers:
                    if on_text is not None:
                        on_text(number, piece)
        finally:
            self._await_end(call, inbox)
        call.raise_error()
        return [
            RequestOutput(prompt if isinstance(prompt, str) else None, tokens, [c.completion for c in samples])
            for prompt, tokens, samples in zip(several, ids, call.collectors, strict=True)
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """Pieces of the answer as they come. Leaving the iterator aborts the request.

        Raises RequestError, and ExecutorError in place of the last piece.
        """
        inbox: Inbox = queue.SimpleQueue()
        call = _Call(self, [self._ids(_one(prompt))], self._params(params, 1), lambda *x: inbox.put(x), live=True)

        def pieces() -> Iterator[StreamPiece]:
            with contextlib.closing(self._answers(call, inbox)) as answers:
                for _, piece in answers:
                    if piece.finish_reason == "error":
                        call.raise_error()
                    yield piece

        return pieces()

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamPiece]:
        """``stream`` for asyncio. Cancelling it aborts the request."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[StreamPiece] = asyncio.Queue()

        def deliver(_: int, piece: StreamPiece) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed over the stream
                loop.call_soon_threadsafe(inbox.put_nowait, piece)

        call = _Call(self, [self._ids(_one(prompt))], self._params(params, 1), deliver, live=True)
        try:
            call.start()
            while call.n_open > 0:
                piece = await inbox.get()
                call.took(0, piece)
                if piece.finish_reason == "error":
                    call.raise_error()
                yield piece
        finally:
            call.abort()

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
        """Token ids of a conversation up to the place of the answer. Raises RequestError for what is none."""
        remedy = 'give a list like [{"role": "user", "content": ...}]'
        given = _items("messages", messages, remedy)
        if not given or not all(isinstance(message, Mapping) for message in given):
            raise RequestError(f"messages = {shown(messages)} is no list of messages", remedy)
        return self._encoded(self.template.render(given), add_special=False)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each token after the first, given those before it.

        It has the executor to itself: requests that run meanwhile wait, and the prefix cache is empty afterwards.
        """
        ids, context = self._ids(_one(token_ids)), self.executor.capacity.context_tokens
        if not ids:
            raise RequestError("token_ids has no tokens to score", "give at least one")
        if len(ids) > context:
            raise RequestError(
                f"token_ids has {len(ids)} tokens and the context holds {context}",
                f"score them in parts{self.scheduler.context_remedy}",
            )
        score = getattr(self.executor, "score")  # noqa: B009  (not of every executor)
        self._thread.wake()  # an error now if it has been closed
        scores = self.engine.call(lambda: score(ids))
        self._thread.wake()
        return [float(x) for x in scores.result()]

    def close(self) -> None:
        """Abort what runs, and release threads and memory; idempotent. The end of the program does it too."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wake(self) -> None:
        """Let the engine's thread take what has been submitted to ``engine`` directly."""
        self._thread.wake()

    def _answers(self, call: _Call, inbox: Inbox) -> Generator[tuple[int, StreamPiece], None, None]:
        """Start a call and yield what it delivers; aborts it if it is left before.

        It does not wait for the end then: the garbage collector may be who closes it, on any thread and at any moment.
        """
        try:
            call.start()
            while call.n_open > 0:
                number, piece = self._next(inbox)
                call.took(number, piece)
                yield number, piece
        finally:
            call.abort()

    def _await_end(self, call: _Call, inbox: Inbox) -> None:
        """Wait until a call that has been aborted is over."""
        with contextlib.suppress(ExecutorError):
            while call.n_open > 0 and not sys.is_finalizing():
                call.took(*self._next(inbox))

    def _next(self, inbox: Inbox) -> tuple[int, StreamPiece]:
        """What is delivered next. Raises ExecutorError if nobody is left to deliver anything."""
        while True:
            try:
                return inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                if not self._thread.alive and inbox.empty():
                    raise ExecutorError("the engine's thread has gone", "open the model again") from None

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            several = [params or SamplingParams()] * n
        elif isinstance(params, str | Mapping) or not isinstance(params, Iterable):
            raise RequestError(f"params = {shown(params)} is no SamplingParams", "give SamplingParams(...)")
        else:
            several = list(params)
        if len(several) != n:
            raise RequestError(f"{len(several)} params for {n} prompts", "give one for all or one for each")
        for each in {id(p): p for p in several}.values():  # often one for all
            if not isinstance(each, SamplingParams):
                raise RequestError(f"params has {shown(each)}, which is no SamplingParams", "give SamplingParams(...)")
            each.check_ids(self.spec.vocab_size)
        return several

    def _ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, each of them one that the model has a row for."""
        last = self.spec.vocab_size - 1
        if isinstance(prompt, str):
            ids = self._encoded(prompt)
            if ids and max(ids) > last:
                raise RequestError(
                    f"the tokenizer makes the token id {max(ids)} of the prompt, and the model's last one is {last}",
                    "use the tokenizer that belongs to the model",
                )
            return ids
        ids = [whole("a token id of the prompt", i, -(1 << 63), 1 << 63) for i in prompt]
        outside = [i for i in ids if not 0 <= i <= last]
        if outside:
            raise RequestError(f"the prompt has the token id {outside[0]}", f"give ids from 0 to {last}")
        return ids

    def _encoded(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError, for one that is far too long before all of it is encoded."""
        longest = self.scheduler.validate(1)
        if self.tokenizer.excess.surely(text, longest):
            raise RequestError(
                f"the prompt has {len(text)} characters, which make more tokens than the {longest} of the context",
                f"shorten the prompt{self.scheduler.context_remedy}",
            )
        return self.tokenizer.encode(text, add_special=add_special)


class _Call:
    """The requests behind one call of the interface: a collector for each sample of each prompt.

    Raises RequestError if a prompt can never run.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        deliver: Deliver,
        live: bool,
        priorities: Sequence[int] = (0,),
    ) -> None:
        for prompt in prompts:
            llm.scheduler.validate(len(prompt))
        self.collectors = [
            [Collector(llm.tokenizer, s, i, partial(deliver, number), live=live) for i in range(s.n)]
            for number, s in enumerate(params)
        ]
        self._llm = llm
        self._live = live
        self._first = list(accumulate((s.n for s in params), initial=0))  # of each prompt, its first request's place
        self._asked = list(zip(prompts, params, self.collectors, priorities, strict=True))
        self._requests: list[int] = []
        self._n_ended = 0

    @property
    def n_open(self) -> int:
        """Samples whose last piece has not been taken."""
        return len(self._requests) - self._n_ended

    def start(self) -> None:
        """Submit them. Raises ExecutorError if the model has been closed."""
        self._llm.wake()
        stops = frozenset(self._llm.model.eos_ids)
        for prompt, sampling, sinks, priority in self._asked:
            self._requests += self._llm.engine.submit(
                prompt, sampling, sinks, stop_ids=stops, priority=priority, read=self._live
            )
        self._llm.wake()

    def took(self, number: int, piece: StreamPiece) -> None:
        """Note that a piece of a prompt's answer has been received."""
        self._n_ended += piece.finish_reason is not None
        ledger = self._llm.engine.ledger
        if self._live and ledger is not None:
            request = self._requests[self._first[number] + piece.index]
            ledger.taken(request, len(piece.token_ids))
            if piece.finish_reason is not None:
                ledger.left(request)

    def abort(self) -> None:
        """End those that are still open."""
        if self.n_open <= 0:
            return
        if self._llm.engine.ledger is not None:
            for request in self._requests:
                self._llm.engine.ledger.left(request)
        with contextlib.suppress(ExecutorError):  # it is closed or another process's, and so they have ended
            self._llm.wake()
            for request in self._requests:
                self._llm.engine.abort(request)
            self._llm.wake()

    def raise_error(self) -> None:
        """Raise what went wrong, if anything did."""
        for samples in self.collectors:
            for collector in samples:
                if collector.error is not None:
                    raise collector.error


_SETTLING_S = 0.0005
_LOOK_S = 1.0  # how often one who waits looks whether anybody is there still
_PRIORITIES = (-(1 << 31), (1 << 31) - 1)
_MAY_BE_NONE = ("threads", "kv_memory_bytes", "context_tokens", "depth")

_open_models: weakref.WeakSet[LLM] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: after it, a stream left open would wait for a thread that no longer runs."""
    for llm in list(_open_models):
        llm.close()


def _checked_counts(given: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's numbers as integers in their ranges, or None. Raises GaplessError naming the argument."""
    return {
        name: None if value is None and name in _MAY_BE_NONE else whole(name, value, *RANGES[name], GaplessError)
        for name, value in given.items()
    }


def _check_executor(executor: object, **of_the_cpu: object) -> None:
    """Raises GaplessError for an unknown executor, and for choices of numerics that the reference does not have."""
    if executor not in ("cpu", "reference"):
        raise GaplessError(f"executor = {shown(executor)} is not known", "choose cpu or reference")
    for name, value in of_the_cpu.items():
        if executor == "reference" and value is not None:
            raise GaplessError(f"{name} = {shown(value)} is not for the reference executor", "leave it out")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a flat sequence of integers is one. Raises RequestError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    several = _items("prompts", prompts)
    if several and all(isinstance(p, numbers.Integral) for p in several):
        return [several]
    return [p if isinstance(p, str) else _items(f"prompts[{i}]", p) for i, p in enumerate(several)]


def _priorities(priority: object, n: int) -> list[int]:
    """One for each of ``n`` prompts. Raises RequestError."""
    if isinstance(priority, str | bytes | Mapping) or not isinstance(priority, Iterable):
        return [whole("priority", priority, *_PRIORITIES)] * n
    several = [whole("priority", each, *_PRIORITIES) for each in priority]
    if len(several) != n:
        raise RequestError(f"{len(several)} priorities for {n} prompts", "give one for all or one for each")
    return several


def _one(prompt: Any) -> Prompt:
    """A prompt: a text, or what is a list of token ids. Raises RequestError for anything else."""
    return prompt if isinstance(prompt, str) else _items("prompt", prompt)


def _items(name: str, values: Any, remedy: str = "give a text or a list of token ids") -> list[Any]:
    """What can be gone through, in an order of its own. Raises RequestError for what cannot."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | bytearray | Mapping | Set):
        with contextlib.suppress(TypeError):  # NumPy's arrays without a dimension say only now that they are none
            return list(values)
    raise RequestError(f"{name} = {shown(values)} is no list", remedy)
