"""Memory layouts shared by the host and the compiled kernels: operations of the tape and the step's description.

Everything is int64 words at fixed indices, so a kernel reads ``ld_i64(op + 8 * K)``. A kernel has the signature
``kernel(op, step, tid, n_threads)`` and does its share ``tid`` of the operation; the walker puts a barrier behind it.
"""

from __future__ import annotations

OP_WORDS = 32  # one row of the tape
OP_KERNEL = 0  # address of the kernel; words from OP_ARGS on belong to it
OP_BARRIER = 1  # 1: wait for all threads behind this operation
OP_ARGS = 2

# What a crew of threads shares: words on two cache lines.
CREW_WORDS = 16
CREW_BEGUN = 0  # how many tasks have been begun
CREW_TAPE = 1
CREW_OPS = 2  # operations of the tape; 0 sends the threads home
CREW_STEP = 3
CREW_BARRIER = 8  # counter of the barrier

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

# Rows that an operation runs over: the step's tokens, its samples, or a range in memory (experts).
ROWS_TOKENS, ROWS_SAMPLES = 0, 1  # else the address of int64[2]: first row, count

# linear_{layout}, gated_{layout}. Strides are bytes from one row (token) to the next.
OP_ROWS = OP_ARGS
LIN_WEIGHTS = OP_ARGS + 1  # address of a PackedMatrix
LIN_GROUP_BYTES = OP_ARGS + 2
LIN_SCALES = OP_ARGS + 3  # offset of the scales in a group
LIN_PAIRS = OP_ARGS + 4  # pairs of weight groups
LIN_DEPTH = OP_ARGS + 5  # blocks of 32 inputs, or inputs of a float layout
LIN_X = OP_ARGS + 6
LIN_X_STRIDE = OP_ARGS + 7
LIN_XD = OP_ARGS + 8  # scales of quantised activations
LIN_XD_STRIDE = OP_ARGS + 9
LIN_Y = OP_ARGS + 10
LIN_Y_STRIDE = OP_ARGS + 11
LIN_ADD = OP_ARGS + 12  # linear only. 1: add to Y
LIN_BIAS = OP_ARGS + 13  # address of float32, padded as the weights are, or 0
LIN_TOKEN_BLOCK = OP_ARGS + 14  # rows whose activations are taken together
LIN_YD = OP_ARGS + 15  # gated only, as the rest. 0: Y is float32, else int8 with these scales
LIN_YD_STRIDE = OP_ARGS + 16
LIN_ACTIVATION = OP_ARGS + 17
LIN_SCRATCH = OP_ARGS + 18
LIN_SCRATCH_STRIDE = OP_ARGS + 19  # bytes of each thread
ACT_SILU, ACT_GELU_TANH = 0, 1

# Operations on rows: embed_{layout}, norm, norm_quantise, norm_add, quantise, softcap.
ROW_X = OP_ARGS + 1  # source rows, or the packed table
ROW_X_STRIDE = OP_ARGS + 2
ROW_Y = OP_ARGS + 3
ROW_Y_STRIDE = OP_ARGS + 4
ROW_WIDTH = OP_ARGS + 5  # elements; rows are padded with zeros to 32
ROW_WEIGHT = OP_ARGS + 6  # of a norm, float32, padded with zeros
ROW_SCALAR = OP_ARGS + 7  # bits of a float32: epsilon, scale or cap
ROW_YD = OP_ARGS + 8
ROW_YD_STRIDE = OP_ARGS + 9
ROW_GROUP_BYTES = OP_ARGS + 10  # of the table
ROW_SCALES = OP_ARGS + 11
ROW_SCRATCH = OP_ARGS + 12  # 128 bytes of each thread, at a stride of 128

XD_BYTES = 16  # beside 32 int8 activations: scale f32, scale * sum f32, -128 * sum int32, unused

# probe_read, probe_multiply.
PROBE_DATA = OP_ARGS
PROBE_BYTES = OP_ARGS + 1
PROBE_ROUNDS = OP_ARGS + 2
PROBE_OUT = OP_ARGS + 3  # 1024 bytes for each thread
