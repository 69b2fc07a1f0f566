"""The CPU executor: describes a step in memory and lets the crew walk the tape for it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gapless.arch.decoder import forward
from gapless.arch.spec import ModelSpec, ModelWeights
from gapless.errors import ExecutorError, ResourceError
from gapless.executor.cpu_step import Slots, StepMemory, single_span
from gapless.executor.crew import Crew
from gapless.executor.profile import TapeProfile, kind_of
from gapless.executor.protocol import Capacity
from gapless.kernels.count import StepCounter
from gapless.kernels.cpu import abi, kv, sample_record
from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.held import kv_element_bytes, packed_infos
from gapless.kernels.cpu.isa import select
from gapless.kernels.cpu.loader import Progress, load_kernels
from gapless.kernels.cpu.record import RecordOps, Weights
from gapless.kernels.cpu.tape import Limits, Rows, Tape
from gapless.machine import allowed_cores, start_thread
from gapless.models.tensor import WeightTensor
from gapless.sampling import SamplingParams
from gapless.step import Admission, StepPlan, StepResult

F32 = npt.NDArray[np.float32]

MAX_STEP_SAMPLES = 256


class CpuExecutor:
    """Implements ``Executor`` with compiled kernels.

    With depth 1 a step runs in ``land``, on the calling thread and the crew: nothing competes with it for the cores.
    With more, a thread of its own runs the steps while the caller plans the next ones.

    Args:
        threads: compute threads; the cores that the process may use if None.
        isa: instruction set by name; the best that the machine has if None.
        kv_dtype: "f16", "f32" or "q8".
        float_weights: compute with float32 weights and activations whatever the file has.
        progress: told what is compiled, if anything is.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights[WeightTensor],
        *,
        n_pages: int,
        n_slots: int,
        max_step_tokens: int = 512,
        context_tokens: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
        kv_dtype: kv.KvDtype = "f16",
        depth: int | None = None,
        float_weights: bool = False,
        progress: Progress | None = None,
    ) -> None:
        target = select(isa)
        self.isa = target.name
        self.kv_dtype = kv_dtype
        self.n_threads = allowed_cores() if threads is None else threads
        self._depth = 1 if depth is None else depth
        # One slot more than requests may hold, for scoring a text of its own.
        self._score_slot = n_slots
        context = min(spec.context_tokens if context_tokens is None else context_tokens, n_pages * abi.PAGE_TOKENS)
        self._capacity = Capacity(
            n_pages, abi.PAGE_TOKENS, n_slots, context, max_step_tokens, min(n_slots, MAX_STEP_SAMPLES)
        )
        limits = Limits(max_step_tokens, self._capacity.max_step_samples, self.n_threads)
        self._arena = Arena()
        kernels = load_kernels(target, progress)
        tape = Tape(kernels, self._arena, limits)
        pool = kv.KvPool(spec, kv_dtype, n_pages, context, self._arena, tape)
        packed = Weights(target, self._arena, float_weights, _release_pages)
        ops = RecordOps(tape, packed, pool)
        logits = forward(ops, spec, weights)
        assert isinstance(logits, Rows)
        self._logits = logits
        self._vocab = spec.vocab_size
        self._n_logits_ops = len(tape)
        self._sampling_ops(tape, logits)
        self._tape = tape.finish()
        kinds = [kind_of(name, int(op[abi.OP_ROWS])) for name, op in zip(tape.kernels, self._tape, strict=True)]
        self.profile = TapeProfile(kernels, self._arena, self.n_threads)
        self._kinds = self._arena.take(8 * len(kinds)).view(np.int64)
        self._kinds[:] = kinds
        # Two, by turns: while a step is tallied the next one may run.
        self._stamps = [self._arena.take(8 * self.n_threads * (len(kinds) + 1)) for _ in range(2)]
        self._stamps_at = [(address_of(stamps), address_of(self._kinds)) for stamps in self._stamps]
        self._tape_at = address_of(self._tape)
        self.weights_bytes = packed.nbytes
        self.kv_bytes = pool.nbytes
        self._slots = Slots(self._arena, n_slots + 1, context)
        self._steps = [
            StepMemory(self._arena, limits, kv.UnitPlanner(spec, limits, context, self._arena))
            for _ in range(self._depth)
        ]
        self._launched: deque[tuple[StepPlan, int, int | None]] = deque()
        # Of the steps in flight where their stamps, the kinds of their operations and their tallies are; or zeros.
        self._stamped = [(0, 0, 0)] * self._depth
        self._n_launched = 0
        infos = packed_infos(weights, target.lanes, float_weights)
        self.counter = StepCounter(spec, infos, kv_element_bytes=kv_element_bytes(spec, kv_dtype))
        self._crew = Crew(kernels, self.n_threads)
        try:
            self._runner = _Runner(self._run) if self._depth > 1 else None
        except ResourceError:
            self._crew.close()
            raise

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def depth(self) -> int:
        return self._depth

    def launch(self, plan: StepPlan) -> None:
        """Describe the step and, with a depth above 1, start it."""
        assert len(self._launched) < self._depth, "no more steps may be in flight"
        assert plan.n_tokens <= self._capacity.max_step_tokens
        for admission in plan.admissions:
            self._slots.admit(admission)
        for span in plan.spans:
            self._slots.map_pages(span)
        index = self._n_launched % self._depth
        memory = self._steps[index]
        memory.fill(plan, self._slots)
        row, tally = self.profile.next_row()
        self._stamped[index] = (0, 0, 0) if row is None else (*self._stamps_at[self._n_launched % 2], tally)
        self._n_launched += 1
        self._launched.append((plan, index, row))
        if self._runner is not None:
            self._runner.start(index)

    def land(self) -> StepResult:
        assert self._launched, "no step is in flight"
        plan, index, row = self._launched.popleft()
        if self._runner is not None:
            self._runner.finish()
        else:
            self._run(index)
        return StepResult(plan.step_id, self._steps[index].results(plan, self._slots), row)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._crew.close()

    def logits(self, token_ids: Sequence[int]) -> F32:
        """Scores after each token of one text: (tokens, vocab). Uses the first pages: nothing may be running."""
        return np.concatenate([scores.copy() for scores in self._score_chunks(token_ids)])

    def score(self, token_ids: Sequence[int]) -> F32:
        """Natural log-probability of each token after the first, given those before it: (tokens - 1,)."""
        ids = np.asarray(token_ids, np.int64)
        out: list[F32] = []
        first = 0
        for scores in self._score_chunks(token_ids):
            following = ids[first + 1 : first + 1 + len(scores)]
            rows = scores[: len(following)]
            peak = rows.max(axis=1)
            total = np.exp(rows - peak[:, None]).sum(axis=1, dtype=np.float64)
            out.append((rows[np.arange(len(rows)), following] - peak - np.log(total)).astype(np.float32))
            first += len(scores)
        return np.concatenate(out)

    def _score_chunks(self, token_ids: Sequence[int]) -> Iterator[F32]:
        """Logits of runs of positions; each is overwritten by the next."""
        n = len(token_ids)
        assert 0 < n <= self._capacity.context_tokens
        assert not self._launched, "steps are in flight"
        tokens = tuple(int(i) for i in token_ids)
        self._slots.admit(Admission(self._score_slot, -1, tokens, n, SamplingParams(temperature=0), 0))
        pages = range(-(-n // abi.PAGE_TOKENS))
        chunk = min(self._capacity.max_step_samples, self._capacity.max_step_tokens)
        for start in range(0, n, chunk):
            count = min(chunk, n - start)
            plan = single_span(count, start, self._score_slot, pages)
            self._slots.map_pages(plan.spans[0])
            memory = self._steps[0]
            memory.fill(plan, self._slots)
            memory.fill_rows(np.arange(count))
            self._crew.run(self._tape_at, self._n_logits_ops, memory.address)
            yield self._logit_rows(count)

    def _logit_rows(self, count: int) -> F32:
        size = count * self._logits.stride
        raw = memoryview((ctypes.c_uint8 * size).from_address(self._logits.address))
        rows: F32 = np.frombuffer(raw, np.float32).reshape(count, -1)
        return rows[:, : self._vocab]

    def _run(self, index: int) -> None:
        self._crew.run(self._tape_at, len(self._tape), self._steps[index].address, self._stamped[index])

    def _sampling_ops(self, tape: Tape, logits: Rows) -> None:
        words = sample_record.sample_words(logits.address, logits.stride, self._vocab, tape)
        tape.emit("argmax", words)
        tape.emit("sample", words)


class _Runner:
    """Runs steps one after the other on a thread of its own."""

    def __init__(self, run: Callable[[int], None]) -> None:
        self._run = run
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="gapless-0", daemon=True)
        start_thread(self._thread)

    def start(self, index: int) -> None:
        self._todo.put(index)

    def finish(self) -> None:
        """Wait for the oldest step."""
        problem = self._done.get()
        if problem is not None:
            raise ExecutorError(f"a step failed: {problem}") from problem

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (index := self._todo.get()) is not None:
            try:
                self._run(index)
                self._done.put(None)
            except BaseException as problem:  # whoever lands must learn of it
                self._done.put(problem)


def _release_pages(tensor: WeightTensor) -> None:
    """Tell the operating system that a packed tensor's file pages are no longer needed."""
    base: object = tensor.data
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        begin = address_of(tensor.data) - address_of(np.frombuffer(base, np.uint8))
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (begin + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0:
            with contextlib.suppress(OSError, ValueError):
                base.madvise(mmap.MADV_DONTNEED, first, size)
