"""An executor on the NumPy interpreter: one step at a time, each finished when ``launch`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.arch.decoder import forward
from gapless.arch.sizes import weight_infos
from gapless.arch.spec import ModelSpec, ModelWeights
from gapless.errors import ModelError
from gapless.executor.protocol import Capacity
from gapless.kernels.count import StepCounter
from gapless.kernels.reference import Array, DenseWeights, KvDtype, PagedKV, ReferenceOps, StepInput
from gapless.kernels.sampling_reference import sample_row
from gapless.models.tensor import WeightTensor
from gapless.step import Admission, SampledToken, Span, StepPlan, StepResult


@dataclass
class _Slot:
    """A running request as the executor knows it; ``tokens`` grows by what is sampled."""

    admission: Admission
    tokens: list[int]


class ReferenceExecutor:
    """Implements ``Executor`` in NumPy; asserts what a plan promises, so that a wrong plan does not pass.

    Args:
        kv_dtype: rounds the cache as one of that type would be.
        dense_budget_bytes: of float32 kept for quantised weights; the others are dequantised at every use.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights[WeightTensor],
        *,
        n_pages: int = 64,
        page_tokens: int = 16,
        n_slots: int = 32,
        max_step_tokens: int = 256,
        kv_dtype: KvDtype = "f32",
        dense_budget_bytes: int = 1 << 30,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._capacity = Capacity(
            n_pages=n_pages,
            page_tokens=page_tokens,
            n_slots=n_slots,
            context_tokens=min(spec.context_tokens, n_pages * page_tokens),
            max_step_tokens=max_step_tokens,
            max_step_samples=n_slots,
        )
        # Every width of the cache is held in float32 here; what a step would read of one is its own.
        element_bytes = {"f32": 4, "f16": 2, "q8": 1 + 4 / page_tokens}[kv_dtype]
        self.counter = StepCounter(spec, weight_infos(weights), kv_element_bytes=element_bytes)
        self._cache = PagedKV(spec, n_pages, page_tokens, kv_dtype)
        self._dense = DenseWeights(dense_budget_bytes)
        self._slots: dict[int, _Slot] = {}
        self._landing: StepResult | None = None

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def profile(self) -> None:
        return None

    @property
    def depth(self) -> int:
        return 1

    def launch(self, plan: StepPlan) -> None:
        """Run the step to its end. Raises ModelError if a score is not finite."""
        assert self._landing is None, "one step may be in flight"
        for admission in plan.admissions:
            assert 0 <= admission.slot < self._capacity.n_slots
            self._slots[admission.slot] = _Slot(admission, list(admission.tokens))
        self._check(plan)
        scores = self._forward(plan.spans) if plan.spans else np.empty((0, self._spec.vocab_size), np.float32)
        if not np.isfinite(scores).all():
            raise ModelError(f"step {plan.step_id} gave scores that are not finite", "check the weights")
        sampling = [span for span in plan.spans if span.sample]
        tokens = tuple(self._sample(span, row) for span, row in zip(sampling, scores, strict=True))
        self._landing = StepResult(plan.step_id, tokens)

    def land(self) -> StepResult:
        assert self._landing is not None, "no step is in flight"
        result, self._landing = self._landing, None
        return result

    def close(self) -> None:
        self._slots.clear()

    def logits(self, token_ids: Sequence[int], *, chunk_tokens: int | None = None) -> Array:
        """Scores after each token of one text: (tokens, vocab). Runs in a cache of its own."""
        n = len(token_ids)
        page_tokens = self._capacity.page_tokens
        pages = tuple(range(-(-n // page_tokens)))
        cache = PagedKV(self._spec, len(pages), page_tokens, self._cache.dtype)
        chunk = chunk_tokens or self._capacity.max_step_tokens
        parts: list[Array] = []
        for start in range(0, n, chunk):
            span = Span(0, 0, start, min(chunk, n - start), pages, sample=False)
            ids = np.asarray(token_ids[span.start : span.end], np.intp)
            parts.append(self._run(StepInput((span,), ids, np.arange(span.count)), cache))
        return np.concatenate(parts)

    def score(self, token_ids: Sequence[int]) -> Array:
        """Natural log-probability of each token after the first, given those before it: (tokens - 1,)."""
        scores = self.logits(token_ids)[:-1].astype(np.float64)
        peak = scores.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(scores - peak).sum(axis=1)) + peak[:, 0]
        chosen: Array = scores[np.arange(len(scores)), np.asarray(token_ids[1:], np.intp)] - log_sum
        return chosen.astype(np.float32)

    def _forward(self, spans: tuple[Span, ...]) -> Array:
        token_ids = [id_ for span in spans for id_ in self._slots[span.slot].tokens[span.start : span.end]]
        ends = np.cumsum([span.count for span in spans])
        rows = ends[[span.sample for span in spans]] - 1
        return self._run(StepInput(spans, np.asarray(token_ids, np.intp), rows), self._cache)

    def _run(self, step: StepInput, cache: PagedKV) -> Array:
        with np.errstate(all="ignore"):  # damaged weights show in the scores
            return forward(ReferenceOps(step, cache, self._dense), self._spec, self._weights)

    def _sample(self, span: Span, scores: Array) -> SampledToken:
        slot = self._slots[span.slot]
        known = slot.admission
        prompt, output = slot.tokens[: known.n_prompt], slot.tokens[known.n_prompt :]
        suppress = known.suppress if len(output) < known.sampling.min_tokens else ()
        token, logprobs = sample_row(scores, known.sampling, known.seed, span.end, prompt, output, suppress)
        slot.tokens.append(token)
        return SampledToken(known.request_id, token, logprobs)

    def _check(self, plan: StepPlan) -> None:
        capacity = self._capacity
        assert plan.n_tokens <= capacity.max_step_tokens
        assert plan.n_samples <= capacity.max_step_samples
        assert len({span.slot for span in plan.spans}) == len(plan.spans), "one span for each slot"
        for span in plan.spans:
            slot = self._slots[span.slot]
            assert slot.admission.request_id == span.request_id, "the slot belongs to another request"
            assert span.count > 0
            assert span.end <= len(slot.tokens)
            assert not span.sample or span.end == len(slot.tokens), "only the last token is sampled from"
            assert span.end <= len(span.pages) * capacity.page_tokens
            assert all(0 <= page < capacity.n_pages for page in span.pages)
