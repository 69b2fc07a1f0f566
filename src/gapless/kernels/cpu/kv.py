"""The key-value cache of the CPU and the host's side of attention: sizes, operations, and the cut into units."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gapless.arch.spec import AttentionSpec, ModelSpec, RopeSpec
from gapless.errors import GaplessError, UnsupportedModelError
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.tape import Limits, Rows, Tape, float_bits

Words = npt.NDArray[np.int64]
KvDtype = Literal["f16", "f32", "q8"]

KERNEL_KINDS: dict[KvDtype, str] = {"f16": "f16", "f32": "f32", "q8": "i8"}
_ELEMENT_BYTES: dict[KvDtype, int] = {"f16": 2, "f32": 4, "q8": 1}

# A step is to have about so many units for each thread, as far as its history can be cut.
FEW_UNITS = 8

_TILE_WORDS = 4
_SPAN, _QUERY, _QUERIES, _SPLITS = range(_TILE_WORDS)


def page_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """Bytes of one page of all layers. Raises GaplessError for an unknown type."""
    if kv_dtype not in get_args(KvDtype):
        raise GaplessError(f"kv_dtype = {kv_dtype!r} is not known", f"choose one of {', '.join(get_args(KvDtype))}")
    return sum(layer_page_bytes(layer.attention, kv_dtype) for layer in spec.layers)


def layer_page_bytes(attention: AttentionSpec, kv_dtype: KvDtype) -> int:
    return attention.n_kv_heads * _head_bytes(attention, kv_dtype)


def _padded(dim: int) -> int:
    return -(-dim // 16) * 16


def _head_bytes(attention: AttentionSpec, kv_dtype: KvDtype) -> int:
    """Keys and values of one head in a page, and for q8 their scales."""
    numbers = 2 * _padded(attention.head_dim) * abi.PAGE_TOKENS * _ELEMENT_BYTES[kv_dtype]
    return numbers + (2 * 4 * abi.PAGE_TOKENS if kv_dtype == "q8" else 0)


class KvPool:
    """Pages of all layers; implements the attention part of a recorder."""

    def __init__(
        self, spec: ModelSpec, kv_dtype: KvDtype, n_pages: int, context_tokens: int, arena: Arena, tape: Tape
    ) -> None:
        self._kind = KERNEL_KINDS[kv_dtype]
        self._dtype = kv_dtype
        self._context = context_tokens
        self._tape = tape
        self._arena = arena
        # A page has its layers side by side: what is touched first lies together, so that the system hands memory out a
        # piece at a time, and not to all layers in one step.
        each = [layer_page_bytes(x.attention, kv_dtype) for x in spec.layers]
        self._page_bytes = sum(each)
        self._pool = arena.take(n_pages * self._page_bytes)
        self._layers = [sum(each[:layer]) for layer in range(len(each))]
        self._ropes: dict[RopeSpec, int] = {}
        self.nbytes = self._pool.nbytes
        self._partials = _partials(arena, spec, context_tokens, tape.limits)

    def rope_cache(
        self, qkv: Rows, layer: int, a: AttentionSpec, q_norm: int | None, k_norm: int | None, eps: float
    ) -> Rows:
        q = self._tape.rows("queries", a.q_dim)
        words = self._words(layer, a, q) | {
            abi.ATT_QKV: qkv.address,
            abi.ATT_QKV_STRIDE: qkv.stride,
            abi.ATT_ROPE: self._rope_table(a.rope),
            abi.ATT_ROPE_HALF: a.rope.rotary_dim // 2,
            abi.ATT_Q_NORM: q_norm or 0,
            abi.ATT_K_NORM: k_norm or 0,
            abi.ATT_EPS: float_bits(eps),
        }
        self._tape.emit(f"rope_cache_{self._kind}", words)
        return q

    def attention(self, q: Rows, layer: int, a: AttentionSpec) -> Rows:
        out = self._tape.rows("attended", a.q_dim)
        words = self._words(layer, a, q) | {
            abi.ATT_SCALE: float_bits(a.scale),
            abi.ATT_WINDOW: a.window or 0,
            abi.ATT_SOFTCAP: float_bits(a.softcap or 0.0),
            abi.ATT_Y: out.address,
            abi.ATT_Y_STRIDE: out.stride,
            abi.ATT_PARTIALS: address_of(self._partials),
        }
        self._tape.emit(f"attention_{self._kind}", words)
        self._tape.emit("attention_merge", words)
        return out

    def _words(self, layer: int, a: AttentionSpec, q: Rows) -> dict[int, int]:
        scratch = scratch_bytes(a)
        return {
            abi.ATT_Q: q.address,
            abi.ATT_Q_STRIDE: q.stride,
            abi.ATT_HEADS: a.n_heads,
            abi.ATT_KV_HEADS: a.n_kv_heads,
            abi.ATT_HEAD_DIM: a.head_dim,
            abi.ATT_POOL: address_of(self._pool) + self._layers[layer],
            abi.ATT_PAGE_BYTES: self._page_bytes,
            abi.ATT_HEAD_BYTES: _head_bytes(a, self._dtype),
            abi.ATT_SCRATCH: self._tape.scratch("attention", scratch),
            abi.ATT_SCRATCH_STRIDE: scratch,
        }

    def _rope_table(self, rope: RopeSpec) -> int:
        """Address of float32[context][cos, sin]; angles are formed in float64 (see ``reference.rotate``)."""
        if rope not in self._ropes:
            half = len(rope.inv_freq)
            table = self._arena.take(self._context * half * 8).view(np.float32).reshape(self._context, 2, half)
            frequencies = np.asarray(rope.inv_freq, np.float64)
            for start in range(0, self._context, 4096):
                angles = np.outer(np.arange(start, min(start + 4096, self._context)), frequencies)
                table[start : start + 4096, 0] = np.cos(angles) * rope.scale
                table[start : start + 4096, 1] = np.sin(angles) * rope.scale
            self._ropes[rope] = address_of(table)
        return self._ropes[rope]


def scratch_bytes(a: AttentionSpec) -> int:
    """Scratch of one thread: of a unit's rows queries, scores, two accumulators, their states; two pages; addresses."""
    dim, rows = _padded(a.head_dim), max(abi.QUERY_ROWS, a.n_heads // a.n_kv_heads)
    size = rows * (3 * dim * 4 + abi.SPLIT_TOKENS * 4 + 2 * 8) + 2 * abi.PAGE_TOKENS * dim * 4 + abi.AHEAD_PAGES * 8
    return -(-size // 64) * 64


def _partials(arena: Arena, spec: ModelSpec, context_tokens: int, limits: Limits) -> npt.NDArray[np.uint8]:
    """Room for the partials of the largest step whose history is shared out."""
    a = max((layer.attention for layer in spec.layers), key=lambda x: x.q_dim)
    spans = -(-FEW_UNITS * limits.n_threads // a.n_kv_heads)
    splits = -(-context_tokens // abi.SPLIT_TOKENS)
    return arena.take(spans * splits * a.n_heads * (abi.PARTIAL_HEAD_BYTES + 4 * _padded(a.head_dim)))


class UnitPlanner:
    """Cuts a step's attention into units, and plans merges where the history of a query is shared out.

    A tile is some consecutive queries of one span. Most tiles are one unit for each KV head, with all of their
    history. A single query whose history is more than a thread's fair part of the step is one unit for each split.
    """

    def __init__(self, spec: ModelSpec, limits: Limits, context_tokens: int, arena: Arena) -> None:
        shapes = {(x.attention.n_heads, x.attention.n_kv_heads) for x in spec.layers}
        if len(shapes) != 1:
            raise UnsupportedModelError(f"layers differ in their heads: {sorted(shapes)}", "choose another model")
        n_heads, self._n_kv_heads = shapes.pop()
        self._group = n_heads // self._n_kv_heads
        self._max_queries = max(1, abi.QUERY_ROWS // self._group)
        self._n_parts = FEW_UNITS * limits.n_threads if limits.n_threads > 1 else 0
        splits = -(-context_tokens // abi.SPLIT_TOKENS)
        # A shared tile is more than one of n_parts equal parts, so there are fewer of them.
        shared, n_units = self._n_parts, limits.step_tokens * self._n_kv_heads + self._n_parts * splits
        self._units = arena.take(n_units * abi.UNIT_WORDS * 8).view(np.int64).reshape(n_units, abi.UNIT_WORDS)
        self._heads = np.tile(np.arange(self._n_kv_heads), limits.step_tokens)
        self._merges = arena.take(shared * abi.MERGE_WORDS * 8).view(np.int64).reshape(shared, abi.MERGE_WORDS)

    def plan(self, words: Words, spans: Words) -> None:
        """Write units and merges for ``spans`` (rows of SPAN_WORDS) into the step's words."""
        tiles = self._tiles(spans)
        work = tiles[:, _QUERIES] * tiles[:, _SPLITS]
        shared = self._are_shared(tiles, work)
        if shared.any():
            n_units = self._plan_whole(tiles[~shared], work[~shared])
            n_units, n_merges = self._plan_shared(n_units, tiles[shared], spans)
        else:
            n_units, n_merges = self._plan_whole(tiles, work), 0
        words[abi.N_UNITS], words[abi.UNITS] = n_units, address_of(self._units)
        words[abi.N_MERGES], words[abi.MERGES] = n_merges, address_of(self._merges)

    def _tiles(self, spans: Words) -> Words:
        """Rows of _TILE words. Tiles are smaller where large ones would be too few for the threads."""
        counts = spans[:, abi.SPAN_COUNT]
        n_queries = int(counts.sum())
        if n_queries == len(spans):
            return self._single_queries(spans)
        size = self._max_queries
        if self._n_parts:
            size = min(size, -(-n_queries * self._n_kv_heads // self._n_parts))
        n_tiles = -(-counts // size)
        tiles = np.empty((int(n_tiles.sum()), _TILE_WORDS), np.int64)
        tiles[:, _SPAN] = span = np.repeat(np.arange(len(spans)), n_tiles)
        tiles[:, _QUERY] = query = (np.arange(len(tiles)) - (np.cumsum(n_tiles) - n_tiles)[span]) * size
        tiles[:, _QUERIES] = queries = np.minimum(size, counts[span] - query)
        tiles[:, _SPLITS] = (spans[span, abi.SPAN_START] + query + queries - 1) // abi.SPLIT_TOKENS + 1
        return tiles

    def _single_queries(self, spans: Words) -> Words:
        tiles = np.empty((len(spans), _TILE_WORDS), np.int64)
        tiles[:, _SPAN] = np.arange(len(spans))
        tiles[:, _QUERY], tiles[:, _QUERIES] = 0, 1
        tiles[:, _SPLITS] = spans[:, abi.SPAN_START] // abi.SPLIT_TOKENS + 1
        return tiles

    def _are_shared(self, tiles: Words, work: Words) -> npt.NDArray[np.bool_]:
        if not self._n_parts:
            return np.zeros(len(tiles), np.bool_)
        part = int(work.sum()) * self._n_kv_heads // self._n_parts
        heavy: npt.NDArray[np.bool_] = tiles[:, _SPLITS] > max(part, 1)
        heavy &= tiles[:, _QUERIES] == 1
        return heavy

    def _plan_whole(self, tiles: Words, work: Words) -> int:
        """Units with all of their history. The heaviest go first, so that none is left over at the end."""
        item, head = self._of_heads(tiles[np.argsort(-work, kind="stable")])
        columns = (item[:, _SPAN], head, item[:, _QUERY], item[:, _QUERIES], 0, item[:, _SPLITS], -1)
        return self._fill(0, len(item), columns)

    def _plan_shared(self, at: int, tiles: Words, spans: Words) -> tuple[int, int]:
        """One unit for each query, head and split; a merge for each query and head."""
        item, head = self._of_heads(tiles)
        n_splits = item[:, _SPLITS]
        before = np.cumsum(n_splits) - n_splits
        merges = self._merges[: len(item)]
        merges[:, abi.MERGE_ROW] = spans[item[:, _SPAN], abi.SPAN_ROW] + item[:, _QUERY]
        merges[:, abi.MERGE_HEAD] = head
        merges[:, abi.MERGE_PARTIAL] = before * self._group
        merges[:, abi.MERGE_SPLITS] = n_splits
        of = np.repeat(np.arange(len(item)), n_splits)
        split = np.arange(len(of)) - before[of]
        partial = np.arange(len(of)) * self._group
        columns = (item[of, _SPAN], head[of], item[of, _QUERY], 1, split, split + 1, partial)
        return at + self._fill(at, len(of), columns), len(item)

    def _of_heads(self, tiles: Words) -> tuple[Words, Words]:
        """Each tile once for each KV head, and the heads."""
        items = np.repeat(tiles, self._n_kv_heads, axis=0)
        return items, self._heads[: len(items)]

    def _fill(self, at: int, n: int, columns: tuple[Any, ...]) -> int:
        units = self._units[at : at + n]
        for word, column in enumerate(columns):
            units[:, word] = column
        return n
