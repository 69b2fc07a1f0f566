"""A step as the kernels see it: arrays in memory whose addresses stand in one row of words (``kernels.cpu.abi``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.kernels.cpu import abi, kv
from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.sample_record import MAX_TOP, SAMPLE_PARAMS, fill_record
from gapless.kernels.cpu.tape import Limits
from gapless.step import Admission, SampledToken, Span, StepPlan, TokenLogprobs

Array = npt.NDArray[Any]


class Slots:
    """What stays in memory for each running request: token ids, page table, sampling record."""

    def __init__(self, arena: Arena, n_slots: int, context_tokens: int) -> None:
        self._n_tokens = context_tokens + 1  # the token sampled at the context's end has a place too
        n_pages = -(-context_tokens // abi.PAGE_TOKENS)
        self.tokens = arena.take(n_slots * self._n_tokens * 4).view(np.int32).reshape(n_slots, self._n_tokens)
        self.pages = arena.take(n_slots * n_pages * 4).view(np.int32).reshape(n_slots, n_pages)
        self.records = arena.take(n_slots * SAMPLE_PARAMS.itemsize).view(SAMPLE_PARAMS)
        self.request_ids = [-1] * n_slots
        self.n_top = [-1] * n_slots  # top log-probabilities wanted; -1: none at all
        self.n_admitted = 0
        self._n_pages = [0] * n_slots
        self._keep: list[Any] = [None] * n_slots  # arrays that a record points to
        self.tokens_at = address_of(self.tokens)
        self.pages_at = address_of(self.pages)

    def admit(self, admission: Admission) -> None:
        slot = admission.slot
        self.n_admitted += 1
        self.tokens[slot, : len(admission.tokens)] = admission.tokens
        self._n_pages[slot] = 0
        self.request_ids[slot] = admission.request_id
        wanted = admission.sampling.logprobs
        self.n_top[slot] = -1 if wanted is None else wanted
        tokens_at = self.tokens_at + slot * self._n_tokens * 4
        self._keep[slot] = fill_record(self.records[slot : slot + 1], admission, tokens_at)

    def map_pages(self, span: Span) -> None:
        """Take over the pages that the span's request has gained since its last step."""
        known, n = self._n_pages[span.slot], len(span.pages)
        if n > known:
            self.pages[span.slot, known:n] = span.pages[known:]
            self._n_pages[span.slot] = n

    def token_addresses(self, slots: Array, positions: Array) -> Array:
        addresses: Array = self.tokens_at + (slots * self._n_tokens + positions) * 4
        return addresses


@dataclass(frozen=True)
class _Decode:
    """A step in which every span is one token that is sampled from: most steps, and much like the one before."""

    slots: list[int]
    starts: list[int]
    n_admitted: int

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots) -> _Decode | None:
        if any(span.count != 1 or not span.sample for span in plan.spans):
            return None
        return cls([s.slot for s in plan.spans], [s.start for s in plan.spans], slots.n_admitted)

    def ahead_of(self, before: _Decode) -> int | None:
        """By how many positions every request is further on; None where the requests are not the same."""
        if self.slots != before.slots or self.n_admitted != before.n_admitted or not self.starts:
            return None
        ahead = self.starts[0] - before.starts[0]
        return ahead if self.starts == [start + ahead for start in before.starts] else None


class StepMemory:
    """Room for the largest step. Filled before each step; its results are read before it is filled again."""

    def __init__(self, arena: Arena, limits: Limits, units: kv.UnitPlanner) -> None:
        n_tokens, n_samples = limits.step_tokens, limits.step_samples
        self._units = units
        self._decode: _Decode | None = None
        self.words = arena.take(abi.STEP_WORDS * 8).view(np.int64)
        self.address = address_of(self.words)

        def array(word: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
            n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            values = arena.take(n_bytes).view(dtype).reshape(shape)
            self.words[word] = address_of(values)
            return values

        self._spans = array(abi.SPANS, (n_tokens, abi.SPAN_WORDS), np.int64)
        self._positions = array(abi.POSITIONS, (n_tokens,), np.int32)
        self._token_ids = array(abi.TOKEN_IDS, (n_tokens,), np.int64)
        self._kv_slots = array(abi.KV_SLOTS, (n_tokens,), np.int64)
        self._token_spans = array(abi.TOKEN_SPANS, (n_tokens,), np.int32)
        self._sample_rows = array(abi.SAMPLE_ROWS, (n_samples,), np.int32)
        self._record_addresses = array(abi.SAMPLE_RECORDS, (n_samples,), np.int64)
        self._records = arena.take(n_samples * SAMPLE_PARAMS.itemsize).view(SAMPLE_PARAMS)
        self._top_ids = arena.take(n_samples * MAX_TOP * 4).view(np.int32).reshape(n_samples, MAX_TOP)
        self._top = arena.take(n_samples * MAX_TOP * 8).view(np.float64).reshape(n_samples, MAX_TOP)
        rows = np.arange(n_samples)
        self._record_addresses[:] = address_of(self._records) + rows * SAMPLE_PARAMS.itemsize
        top_ids, top = address_of(self._top_ids), address_of(self._top)
        self._top_addresses = (top_ids + rows * MAX_TOP * 4, top + rows * MAX_TOP * 8)
        # Columns that every step touches: NumPy takes its time to find a field.
        self._sample_positions, self._sampled = self._records["position"], self._records["token"]
        self._reports = self._records["report_logprobs"]
        self._span_starts = self._spans[:, abi.SPAN_START]

    def fill(self, plan: StepPlan, slots: Slots) -> None:
        """Describe the plan. Page tables must hold the spans' pages."""
        decode = _Decode.of(plan, slots)
        before, self._decode = self._decode, decode
        if before is not None and decode is not None and (ahead := decode.ahead_of(before)) is not None:
            self._advance(ahead, decode, slots)
        else:
            self._describe(plan, slots)

    def _advance(self, ahead: int, decode: _Decode, slots: Slots) -> None:
        """The same requests, each decoding its next token: move what was described before."""
        n = len(decode.starts)
        positions = self._positions[:n]
        before = positions.copy()
        positions += ahead
        self._token_ids[:n] += 4 * ahead
        self._kv_slots[:n] += ahead
        self._sample_positions[:n] += ahead
        self._span_starts[:n] += ahead
        if (before // abi.PAGE_TOKENS != positions // abi.PAGE_TOKENS).any():
            self._place(np.array(decode.slots), positions.astype(np.int64), n, slots)
            self._units.plan(self.words, self._spans[:n])

    def _describe(self, plan: StepPlan, slots: Slots) -> None:
        spans = plan.spans
        n_spans = len(spans)
        slot, start, count = np.array([(s.slot, s.start, s.count) for s in spans], np.int64).reshape(-1, 3).T
        ends = np.cumsum(count)
        first = ends - count
        n_tokens = int(ends[-1]) if n_spans else 0
        self._describe_spans(slot, start, count, first, slots)
        self._describe_tokens(slot, start, count, first, n_tokens, slots)
        sampled = np.flatnonzero(np.fromiter((s.sample for s in spans), np.bool_, n_spans))
        self._describe_samples(slot[sampled], (start + count)[sampled], ends[sampled] - 1, slots)
        self.words[abi.N_TOKENS], self.words[abi.N_SPANS] = n_tokens, n_spans
        self._units.plan(self.words, self._spans[:n_spans])

    def fill_rows(self, rows: Array) -> None:
        """Ask for the logits of these token rows, whoever samples them."""
        self._sample_rows[: len(rows)] = rows
        self.words[abi.N_SAMPLES] = len(rows)

    def results(self, plan: StepPlan, slots: Slots) -> tuple[SampledToken, ...]:
        """What the step sampled, in the plan's order."""
        spans = [span for span in plan.spans if span.sample]
        n = len(spans)
        columns = zip(spans, self._sampled[:n].tolist(), self._reports[:n].tolist(), strict=True)
        return tuple(
            SampledToken(span.request_id, token, self._logprobs(row) if report else None)
            for row, (span, token, report) in enumerate(columns)
        )

    def _describe_spans(self, slot: Array, start: Array, count: Array, first: Array, slots: Slots) -> None:
        table = self._spans[: len(slot)]
        table[:, abi.SPAN_ROW], table[:, abi.SPAN_START], table[:, abi.SPAN_COUNT] = first, start, count
        table[:, abi.SPAN_PAGES] = slots.pages_at + slot * slots.pages.strides[0]

    def _describe_tokens(
        self, slot: Array, start: Array, count: Array, first: Array, n_tokens: int, slots: Slots
    ) -> None:
        of_span = np.repeat(np.arange(len(slot)), count)
        positions = np.arange(n_tokens) + (start - first)[of_span]
        slot_of = slot[of_span]
        self._positions[:n_tokens] = positions
        self._token_spans[:n_tokens] = of_span
        self._token_ids[:n_tokens] = slots.token_addresses(slot_of, positions)
        self._place(slot_of, positions, n_tokens, slots)

    def _place(self, slot_of: Array, positions: Array, n_tokens: int, slots: Slots) -> None:
        pages = slots.pages[slot_of, positions // abi.PAGE_TOKENS].astype(np.int64)
        self._kv_slots[:n_tokens] = pages * abi.PAGE_TOKENS + positions % abi.PAGE_TOKENS

    def _describe_samples(self, slot: Array, position: Array, rows: Array, slots: Slots) -> None:
        n = len(slot)
        self.fill_rows(rows)
        records = self._records[:n]
        records[:] = slots.records[slot]
        records["position"] = position
        records["top_ids"], records["top"] = self._top_addresses[0][:n], self._top_addresses[1][:n]

    def _logprobs(self, row: int) -> TokenLogprobs:
        record = self._records[row]
        n = int(record["n_reported"])
        top_ids = tuple(self._top_ids[row, :n].tolist())
        return TokenLogprobs(float(record["chosen"]), top_ids, tuple(self._top[row, :n].tolist()))


def single_span(token_count: int, start: int, slot: int, pages: Sequence[int]) -> StepPlan:
    """A plan of one span that samples nothing."""
    return StepPlan(0, (), (Span(-1, slot, start, token_count, tuple(pages), sample=False),))
