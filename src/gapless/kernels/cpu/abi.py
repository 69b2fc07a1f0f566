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
CREW_STAMPS = 4  # address of int64[n_threads][n_ops + 1]: when each thread began and was done with each operation, or 0
CREW_KINDS = 5  # address of int64[n_ops]: the column of each operation
CREW_TALLY = 6  # address of int64[TALLY_THREADS + n_threads]: what the stamps of the step say
CREW_BARRIER = 8  # counter of the barrier

# A tally, in ticks of the counter; those of columns are sums over threads.
TALLY_FIRST = 0  # when the first thread began
TALLY_LAST = 1  # when the last one was done; written last, so 0 until the rest is there
TALLY_COLUMNS = 2  # from here on: in operations of each column
TALLY_THREADS = 32  # from here on: for how long each thread waited for others

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
TOKEN_SPANS = 13  # address of int32[n_tokens]: the span of each token

SPAN_WORDS = 4
SPAN_ROW = 0  # first token row
SPAN_START = 1  # position of that row
SPAN_COUNT = 2
SPAN_PAGES = 3  # address of int32[]: pages in order

# A unit is a tile of consecutive queries of one span and one KV head against the splits [split_lo, split_hi).
UNIT_WORDS = 7
UNIT_SPAN = 0
UNIT_HEAD = 1
UNIT_QUERY = 2  # first query, counted in its span
UNIT_QUERIES = 3
UNIT_SPLIT_LO = 4
UNIT_SPLIT_HI = 5
UNIT_PARTIAL = 6  # first partial of the scratch (of one query: by split, then by head of the group), or -1

# A merge joins the partials of one query row and one KV head, in order of position.
MERGE_WORDS = 4
MERGE_ROW = 0
MERGE_HEAD = 1
MERGE_PARTIAL = 2
MERGE_SPLITS = 3

PAGE_TOKENS = 16
SPLIT_TOKENS = 256  # history is summed in splits at multiples of this position, whoever computes them
AHEAD_PAGES = 4  # whose lines attention fetches in turn; a power of 2

# rope_cache_{kv}, attention_{kv}, attention_merge. A page holds, for each KV head, keys [dim][token], values
# [token][dim] and, for int8, float32 scales of 16 keys and of 16 values; dim is padded to 16.
ATT_Q = OP_ARGS  # rotated queries, float32 rows; rope_cache writes them
ATT_Q_STRIDE = OP_ARGS + 1
ATT_HEADS = OP_ARGS + 2
ATT_KV_HEADS = OP_ARGS + 3
ATT_HEAD_DIM = OP_ARGS + 4
ATT_POOL = OP_ARGS + 5  # of the layer
ATT_PAGE_BYTES = OP_ARGS + 6
ATT_HEAD_BYTES = OP_ARGS + 7  # of one KV head in a page
ATT_QKV = OP_ARGS + 8  # rope_cache: rows of q, k, v side by side
ATT_QKV_STRIDE = OP_ARGS + 9
ATT_ROPE = OP_ARGS + 10  # float32[position][cos: half, sin: half]
ATT_ROPE_HALF = OP_ARGS + 11
ATT_Q_NORM = OP_ARGS + 12  # weights of a norm per head, or 0
ATT_K_NORM = OP_ARGS + 13
ATT_EPS = OP_ARGS + 14  # bits of a float32
ATT_SCALE = OP_ARGS + 15  # attention: bits of the factor of the scores
ATT_WINDOW = OP_ARGS + 16  # positions seen; 0: all
ATT_SOFTCAP = OP_ARGS + 17  # bits; 0: none
ATT_Y = OP_ARGS + 18  # output rows
ATT_Y_STRIDE = OP_ARGS + 19
ATT_SCRATCH = OP_ARGS + 20
ATT_SCRATCH_STRIDE = OP_ARGS + 21
ATT_PARTIALS = OP_ARGS + 22

QUERY_ROWS = 48  # rows of a unit: queries times heads of the group, at most (or one query)
PARTIAL_HEAD_BYTES = 64  # of a partial: maximum, sum; then the accumulator

# Rows that an operation runs over: the step's tokens, its samples, or a range in memory (experts).
ROWS_TOKENS, ROWS_SAMPLES = 0, 1  # else the address of int64[2]: first row, count

# linear_{layout}, gated_{layout}. Strides are bytes from one row (token) to the next.
OP_ROWS = OP_ARGS
LIN_WEIGHTS = OP_ARGS + 1  # address of a PackedMatrix
LIN_PAIR_BYTES = OP_ARGS + 2
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
ROW_PAIR_BYTES = OP_ARGS + 10  # of the table
ROW_SCRATCH = OP_ARGS + 12  # 128 bytes of each thread, at a stride of 128

# Beside 32 int8 activations: scale f32, scale * sum f32, ROUNDER_BITS - 128 * sum int32, -ROUNDER * scale f32.
XD_BYTES = 16
# An int32 sum s below 2^22 added to the bits of ROUNDER is the float32 ROUNDER + s: sums become floats for nothing.
# Scales have 22 significant bits, so that ROUNDER * scale, and with it s * scale, loses nothing.
ROUNDER = 12582912.0  # 1.5 * 2^23
ROUNDER_BITS = 0x4B400000

# probe_read, probe_multiply.
PROBE_DATA = OP_ARGS
PROBE_BYTES = OP_ARGS + 1
PROBE_ROUNDS = OP_ARGS + 2
PROBE_OUT = OP_ARGS + 3  # 1024 bytes for each thread

# route, dispatch, gather, combine: routed experts. Row r of the gathered rows belongs to one (token, rank).
MOE_SCORES = OP_ARGS  # router's scores, float32 rows
MOE_SCORES_STRIDE = OP_ARGS + 1
MOE_EXPERTS = OP_ARGS + 2
MOE_TOP_K = OP_ARGS + 3
MOE_RENORMALIZE = OP_ARGS + 4
MOE_IDS = OP_ARGS + 5  # int32[token][rank]: the expert
MOE_SHARES = OP_ARGS + 6  # float32[token][rank]
MOE_PLACES = OP_ARGS + 7  # int32[token][rank]: the gathered row
MOE_TOKENS = OP_ARGS + 8  # int32[row]: the token
MOE_RANGES = OP_ARGS + 9  # int64[expert][2]: first row and count; then (0, all rows)
MOE_X = OP_ARGS + 10  # gather: rows copied from; combine: the experts' outputs
MOE_X_STRIDE = OP_ARGS + 11
MOE_Y = OP_ARGS + 12
MOE_Y_STRIDE = OP_ARGS + 13
MOE_BYTES = OP_ARGS + 14  # gather: of a row
MOE_XD = OP_ARGS + 15  # a second set of rows to gather, or 0
MOE_XD_STRIDE = OP_ARGS + 16
MOE_YD = OP_ARGS + 17
MOE_YD_STRIDE = OP_ARGS + 18
MOE_YD_BYTES = OP_ARGS + 19
