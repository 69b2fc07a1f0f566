"""The sampling record of a row: what the host fills and the compiled sampler reads and answers. No Numba here.

**Record.** ``SAMPLE_PARAMS`` describes it. ``fill_record`` fills one for each slot when its request is admitted. Each
step copies the records of its samples to memory of its own, sets ``position`` and the result addresses there, and
gives the address of each copy in ``abi.SAMPLE_RECORDS``. So the results of a step (``token``, ``chosen``,
``n_reported`` and the arrays at ``top_ids`` and ``top``) stay readable while the next step runs.

**Operations.** ``argmax``, a barrier, then ``sample``, on the same words (``sample_words``). Threads share the
vocabulary of every row that is plain greedy (temperature 0 without log-probabilities, penalties, bias or suppressed
ids), so that a single row is quick too; rows that need more go one to a thread. A greedy row is one pass over its
logits; a draw costs four more passes over 4 bytes a token, a cut some twelve.

**Token.** It goes to ``token`` of the record, and as an int32 to ``tokens[position]``, the request's slot, where the
next step embeds it before the host has seen it. Where no logit is a finite number ``token`` is -1, and the slot gets
the lowest id that is not suppressed.

**Penalties** count the ids in the slot up to ``position`` anew at each step, so a token of a step in flight is counted
and a preempted request needs no state. That is a scan of the request's ids; without penalties none is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.kernels.cpu.abi import OP_ARGS
from gapless.kernels.cpu.arena import address_of
from gapless.kernels.cpu.tape import Tape
from gapless.step import Admission

SAMPLE_BLOCK = 512  # tokens whose weights are summed apart, so that a draw scans one block
MAX_TOP = 1000  # tokens whose log-probabilities a request may ask for
BAND = 256  # tokens that a cut may leave to be sorted
MAX_KEYS = 2048  # at least MAX_TOP + BAND


SAMPLE_PARAMS = np.dtype(
    [
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("repetition_penalty", "<f8"),
        ("presence_penalty", "<f8"),
        ("frequency_penalty", "<f8"),
        ("top_k", "<i8"),
        ("seed", "<u8"),  # modulo 2**64
        ("position", "<i8"),  # of the token to be chosen: how many tokens come before it
        ("n_prompt", "<i8"),
        ("tokens", "<i8"),  # address of int32[]: prompt, output; the chosen token is written at ``position``
        ("min_position", "<i8"),  # ``suppress`` holds at positions below this: n_prompt + min_tokens
        ("n_suppress", "<i8"),
        ("suppress", "<i8"),  # address of int32[n_suppress]
        ("n_bias", "<i8"),
        ("bias_ids", "<i8"),  # address of int32[n_bias], each id once
        ("bias", "<i8"),  # address of float32[n_bias]
        ("report_logprobs", "<i8"),  # 1: fill ``chosen`` and the top ones
        ("n_top", "<i8"),  # how many top tokens to report, at most MAX_TOP
        ("top_ids", "<i8"),  # address of int32[n_top]
        ("top", "<i8"),  # address of float64[n_top]
        # Results.
        ("token", "<i8"),
        ("chosen", "<f8"),
        ("n_reported", "<i8"),
    ]
)
"""The record of one sampling row: filled at admission; ``position`` and the result addresses before each step."""

PARTIAL_WORDS = 2  # of an argmax: largest value (float64), its id or -1


def _offset(name: str) -> int:
    fields = SAMPLE_PARAMS.fields
    assert fields is not None
    return int(fields[name][1])


TEMPERATURE, TOP_P, MIN_P = _offset("temperature"), _offset("top_p"), _offset("min_p")
REPETITION, PRESENCE = _offset("repetition_penalty"), _offset("presence_penalty")
FREQUENCY, TOP_K, SEED = _offset("frequency_penalty"), _offset("top_k"), _offset("seed")
POSITION, N_PROMPT, TOKENS = _offset("position"), _offset("n_prompt"), _offset("tokens")
MIN_POSITION, N_SUPPRESS, SUPPRESS = _offset("min_position"), _offset("n_suppress"), _offset("suppress")
N_BIAS, BIAS_IDS, BIAS = _offset("n_bias"), _offset("bias_ids"), _offset("bias")
REPORT, N_TOP, TOP_IDS, TOP = _offset("report_logprobs"), _offset("n_top"), _offset("top_ids"), _offset("top")
TOKEN, CHOSEN, N_REPORTED = _offset("token"), _offset("chosen"), _offset("n_reported")


def scratch_bytes(vocab: int) -> int:
    """Scratch of one thread. Allocate it zeroed, at a multiple of 64; the marks in it are zero between rows."""
    n = -(-vocab // SAMPLE_BLOCK) * SAMPLE_BLOCK
    return 4 * n * 3 + 8 * (n // SAMPLE_BLOCK) + 8 * MAX_KEYS


LOGITS, ROW_BYTES, VOCAB, SCRATCH, SCRATCH_STRIDE, PARTIALS = range(OP_ARGS, OP_ARGS + 6)
"""Words of both operations: address of the logits, bytes from one sampling row to the next, size of the vocabulary,
address of the scratch and bytes of it for each thread, and the address of
int64[max_step_samples][n_threads][PARTIAL_WORDS] for an argmax shared by the threads, or 0 to do without."""


def fill_record(record: npt.NDArray[Any], admission: Admission, tokens_at: int) -> tuple[Any, ...]:
    """Fill a slot's record (a view of one SAMPLE_PARAMS). Returns arrays that it points to: keep them.

    Position and result addresses are set before each step. Ids that no vocabulary has are left out.
    """
    p = admission.sampling
    suppress = np.array([i for i in admission.suppress if _may_be_id(i)], np.int32)
    biased = {i: value for i, value in p.logit_bias.items() if _may_be_id(i)}
    bias_ids = np.array(list(biased), np.int32)
    with np.errstate(over="ignore"):
        bias = np.array(list(biased.values()), np.float64).astype(np.float32)
    record[:] = np.zeros((), SAMPLE_PARAMS)
    values = {
        "temperature": p.temperature,
        "top_p": p.top_p,
        "min_p": p.min_p,
        "repetition_penalty": p.repetition_penalty,
        "presence_penalty": p.presence_penalty,
        "frequency_penalty": p.frequency_penalty,
        "top_k": p.top_k,
        "seed": admission.seed % (1 << 64),
        "n_prompt": admission.n_prompt,
        "tokens": tokens_at,
        "min_position": admission.n_prompt + p.min_tokens,
        "n_suppress": len(suppress),
        "suppress": address_of(suppress),
        "n_bias": len(bias_ids),
        "bias_ids": address_of(bias_ids),
        "bias": address_of(bias),
        "report_logprobs": p.logprobs is not None,
        "n_top": min(p.logprobs or 0, MAX_TOP),
    }
    for name, value in values.items():
        record[name] = value
    return suppress, bias_ids, bias


def _may_be_id(token: int) -> bool:
    return 0 <= token < 1 << 31


def sample_words(logits: int, row_bytes: int, vocab: int, tape: Tape) -> dict[int, int]:
    """Words of the two sampling operations of a tape."""
    scratch = -(-scratch_bytes(vocab) // 64) * 64
    limits = tape.limits
    return {
        LOGITS: logits,
        ROW_BYTES: row_bytes,
        VOCAB: vocab,
        SCRATCH: tape.scratch("sample", scratch),
        SCRATCH_STRIDE: scratch,
        PARTIALS: tape.scratch("argmax", limits.step_samples * PARTIAL_WORDS * 8),
    }
