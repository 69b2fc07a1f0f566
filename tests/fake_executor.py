"""An executor whose tokens are a hash of everything before them, read back through the pages that a plan names.

A page that is shared wrongly, stale, or written by somebody else gives another hash or a wrong position: the tokens
then differ from ``oracle``. Steps are computed when they land and admissions when they are launched, which is as far
apart as an executor may have them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gapless.executor.protocol import Capacity
from gapless.step import Admission, SampledToken, Span, StepPlan, StepResult

VOCAB = 97
EOS = 0


def fold(before: int, token: int) -> int:
    return (before * 1_000_003 ^ (token + 0x9E3779B9)) & 0xFFFFFFFFFFFF


def choose(state: int, seed: int) -> int:
    return fold(fold(state, seed), 17) // 7 % VOCAB


def oracle(prompt: tuple[int, ...], n: int, seed: int, stops: frozenset[int]) -> list[int]:
    """What a request generates alone: up to ``n`` tokens, or one of ``stops``."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    output: list[int] = []
    while len(output) < n:
        output.append(choose(state, seed))
        state = fold(state, output[-1])
        if output[-1] in stops:
            break
    return output


@dataclass
class _Slot:
    admission: Admission
    tokens: list[int]


class FakeExecutor:
    def __init__(
        self,
        *,
        n_pages: int = 16,
        page_tokens: int = 4,
        n_slots: int = 4,
        context_tokens: int = 64,
        max_step_tokens: int = 16,
        depth: int = 1,
    ) -> None:
        self._capacity = Capacity(n_pages, page_tokens, n_slots, context_tokens, max_step_tokens, n_slots)
        self._depth = depth
        self._pages: list[list[tuple[int, int]]] = [[(-1, -1)] * page_tokens for _ in range(n_pages)]
        self._slots: dict[int, _Slot] = {}
        self._launched: deque[StepPlan] = deque()
        self.n_tokens: list[int] = []

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def depth(self) -> int:
        return self._depth

    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < self._depth
        assert 0 < plan.n_tokens <= self._capacity.max_step_tokens
        assert plan.n_samples <= self._capacity.max_step_samples
        for admission in plan.admissions:
            self._slots[admission.slot] = _Slot(admission, list(admission.tokens))
        self._launched.append(plan)
        self.n_tokens.append(plan.n_tokens)

    def land(self) -> StepResult:
        plan = self._launched.popleft()
        states = [self._compute(span) for span in plan.spans]
        tokens = tuple(self._sample(span, state) for span, state in zip(plan.spans, states, strict=True) if span.sample)
        return StepResult(plan.step_id, tokens)

    def close(self) -> None:
        pass

    def _compute(self, span: Span) -> int:
        slot = self._slots[span.slot]
        assert slot.admission.request_id == span.request_id, "the slot belongs to another request"
        assert span.end <= len(slot.tokens)
        state = 0 if span.start == 0 else self._read(span, span.start - 1)
        for position in range(span.start, span.end):
            state = fold(state, slot.tokens[position])
            page, offset = self._place(span, position)
            self._pages[page][offset] = (position, state)
        for position in range(span.end):
            self._read(span, position)
        return state

    def _read(self, span: Span, position: int) -> int:
        page, offset = self._place(span, position)
        found, state = self._pages[page][offset]
        assert found == position, "the page holds other positions"
        return state

    def _place(self, span: Span, position: int) -> tuple[int, int]:
        size = self._capacity.page_tokens
        return span.pages[position // size], position % size

    def _sample(self, span: Span, state: int) -> SampledToken:
        slot = self._slots[span.slot]
        assert len(slot.tokens) == span.end, "only the last token is sampled from"
        token = choose(state, slot.admission.seed)
        slot.tokens.append(token)
        return SampledToken(span.request_id, token)
