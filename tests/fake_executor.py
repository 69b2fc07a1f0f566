"""An executor whose tokens are a hash of everything before them, read back through the pages that a plan names.

Every position of every span is read through its pages and held to the request's own tokens, before the step writes
(no span may count on what another writes in the same step) and after it (no span may write over another's). So a page
that is shared wrongly, stale or given away too early shows at once. Steps are computed when they land and admissions
when they are launched, which is as far apart as an executor may have them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gapless.errors import ExecutorError
from gapless.executor.protocol import Capacity
from gapless.kernels.count import StepCounter
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
    states: list[int] = field(default_factory=list)  # of the hash, after each token
    pages: tuple[int, ...] = ()

    def expected(self, n: int) -> list[int]:
        """The states of the first ``n`` positions."""
        for token in self.tokens[len(self.states) : n]:
            self.states.append(fold(self.states[-1] if self.states else 0, token))
        return self.states


class FakeExecutor:
    """The step numbered ``fails_at``, and those launched by then, raise instead of landing; all pages are lost."""

    def __init__(
        self,
        *,
        n_pages: int = 16,
        page_tokens: int = 4,
        n_slots: int = 4,
        context_tokens: int = 64,
        max_step_tokens: int = 16,
        max_step_samples: int | None = None,
        depth: int = 1,
        fails_at: int = -1,
    ) -> None:
        samples = n_slots if max_step_samples is None else max_step_samples
        self._capacity = Capacity(n_pages, page_tokens, n_slots, context_tokens, max_step_tokens, samples)
        self._depth = depth
        self._pages: list[list[tuple[int, int]]] = [[(-1, -1)] * page_tokens for _ in range(n_pages)]
        self._slots: dict[int, _Slot] = {}
        self._launched: deque[StepPlan] = deque()
        self.fails_at = fails_at
        self._n_lost = 0
        self.plans: list[StepPlan] = []

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def profile(self) -> None:
        return None

    @property
    def counter(self) -> StepCounter:
        raise AssertionError("there is no model to count")

    @property
    def depth(self) -> int:
        return self._depth

    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < self._depth
        assert 0 < plan.n_tokens <= self._capacity.max_step_tokens
        assert plan.n_samples <= self._capacity.max_step_samples
        flying = {span.slot for launched in self._launched for span in launched.spans}
        for admission in plan.admissions:
            assert admission.slot not in flying, "a slot is filled while steps write to it"
            self._slots[admission.slot] = _Slot(admission, list(admission.tokens))
        for span in plan.spans:
            slot = self._slots[span.slot]
            assert span.pages[: len(slot.pages)] == slot.pages, "pages are only added while a request keeps its slot"
            slot.pages = span.pages
        self._launched.append(plan)
        self.plans.append(plan)

    def land(self) -> StepResult:
        plan = self._launched.popleft()
        if plan.step_id == self.fails_at:
            self._n_lost = len(self._launched) + 1
            self._lose_pages()
        if self._n_lost > 0:
            self._n_lost -= 1
            raise ExecutorError(f"step {plan.step_id} failed", "try again")
        for span in plan.spans:
            self._verify(span, span.start)
        for span in plan.spans:
            self._write(span)
        for span in plan.spans:
            self._verify(span, span.end)
        return StepResult(plan.step_id, tuple(self._sample(span) for span in plan.spans if span.sample))

    def close(self) -> None:
        pass

    def score(self, token_ids: list[int]) -> list[float]:
        """Like the CPU's: overwrites pages from the first on."""
        assert not self._launched
        self._lose_pages()
        return [-1.0] * (len(token_ids) - 1)

    def _lose_pages(self) -> None:
        for page in self._pages:
            page[:] = [(-1, -1)] * self._capacity.page_tokens

    def _verify(self, span: Span, n_positions: int) -> None:
        """Every position up to there is where the span will look for it, and is the request's own."""
        slot = self._slots[span.slot]
        assert slot.admission.request_id == span.request_id, "the slot belongs to another request"
        assert span.end <= len(slot.tokens), "tokens that do not exist yet"
        expected = slot.expected(n_positions)
        for position in range(n_positions):
            page, offset = self._place(span, position)
            assert self._pages[page][offset] == (position, expected[position]), "the page holds something else"

    def _write(self, span: Span) -> None:
        expected = self._slots[span.slot].expected(span.end)
        for position in range(span.start, span.end):
            page, offset = self._place(span, position)
            self._pages[page][offset] = (position, expected[position])

    def _place(self, span: Span, position: int) -> tuple[int, int]:
        size = self._capacity.page_tokens
        return span.pages[position // size], position % size

    def _sample(self, span: Span) -> SampledToken:
        slot = self._slots[span.slot]
        assert len(slot.tokens) == span.end, "only the last token is sampled from"
        token = choose(slot.expected(span.end)[span.end - 1], slot.admission.seed)
        slot.tokens.append(token)
        return SampledToken(span.request_id, token)
