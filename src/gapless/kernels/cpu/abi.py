"""Memory layouts shared by the host and the compiled kernels: operations of the tape and the step's description.

Everything is int64 words at fixed indices, so a kernel reads ``ld_i64(op + 8 * K)``. A kernel has the signature
``kernel(op, step, tid, n_threads)`` and does its share ``tid`` of the operation; the walker puts a barrier behind it.
"""

from __future__ import annotations

OP_WORDS = 32  # one row of the tape
OP_KERNEL = 0  # address of the kernel; words from OP_ARGS on belong to it
OP_BARRIER = 1  # 1: wait for all threads behind this operation
OP_ARGS = 2

# The step's description.
STEP_WORDS = 32
N_TOKENS = 0
N_SPANS = 1
N_SAMPLES = 2
SPANS = 3  # address of int64[n_spans][SPAN_WORDS]
POSITIONS = 4  # address of int32[n_tokens]: position of each token in its request
TOKEN_IDS = 5  # address of int64[n_tokens]: address of each token's int32 id in its slot
KV_SLOTS = 6  # address of int64[n_tokens]: page * page_tokens + offset where the token's key and value go
SAMPLE_ROWS = 7  # address of int32[n_samples]: the token row whose logits are sampled
SAMPLE_RECORDS = 8  # address of int64[n_samples]: address of each sampling record
N_UNITS = 9
UNITS = 10  # address of int64[n_units][UNIT_WORDS]: attention work
N_MERGES = 11
MERGES = 12  # address of int64[n_merges][MERGE_WORDS]
PARTIALS = 13  # address of the scratch for split attention
TOKEN_SPANS = 14  # address of int32[n_tokens]: the span of each token

SPAN_WORDS = 4
SPAN_ROW = 0  # first token row
SPAN_START = 1  # position of that row
SPAN_COUNT = 2
SPAN_PAGES = 3  # address of int32[]: pages in order

# A unit is a tile of consecutive queries of one span against the splits [split_lo, split_hi) of its history.
UNIT_WORDS = 6
UNIT_SPAN = 0
UNIT_ROW = 1  # first query row
UNIT_QUERIES = 2
UNIT_SPLIT_LO = 3
UNIT_SPLIT_HI = 4
UNIT_PARTIAL = 5  # first partial of the scratch, or -1: merge at once and write the result

# A merge joins the partials of one query row, in order of position.
MERGE_WORDS = 3
MERGE_ROW = 0
MERGE_PARTIAL = 1
MERGE_COUNT = 2

PAGE_TOKENS = 16
SPLIT_TOKENS = 128  # history is summed in splits at multiples of this position, whoever computes them

KV_F32, KV_F16, KV_I8 = 0, 1, 2
