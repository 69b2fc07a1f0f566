"""Sampling as plain NumPy: the truth that every compiled sampler is tested against, bit for bit.

Order of one row (float32 throughout unless said)::

    logits                      above 1e30 count as 1e30; NaN and below -1e30 as -inf (again after each line)
      repetition penalty        once for each id in prompt or output: x / r if x > 0, else x * r
      frequency, presence       ids in the output: x - frequency * count, then x - presence
      logit bias                x + bias
      suppress                  x = -inf (end-of-sequence and stop ids before ``min_tokens``)
    -> log-probabilities are reported here; temperature 0 takes the largest, the lowest id among equals
      temperature               z = (x - max x) * (1 / T)
      top_k                     the first k in the order (x falling, id rising)
      top_p                     the shortest prefix of those, in that order, with top_p of their mass
      min_p                     drop weights below min_p times the largest one
      draw                      inverse of the cumulative weight, over what is left in id order

vLLM (V1) applies bias and ``min_tokens`` before the penalties, reports log-probabilities of the raw logits by
default, and applies min_p before top_k and top_p; Hugging Face transformers has the order above. The three
agree where a request uses one filter at a time. Equal logits at the edge of top_k or top_p are told apart by
id here (vLLM keeps all ties of top_k).

**Exact by construction.** A weight is ``exp(z)`` by a polynomial of separately rounded float32 products and
sums (no fused multiply-add), then rounded to a multiple of 2**-34. A weight is at most 1, so sums over up
to 2**19 tokens are exact in float64 *in any order*: the width of the vectors, the number of threads and the
rest of the batch cannot change a sum, a cut or a draw. Tokens below 2**-35 of the likeliest one are never
drawn; all of them together have less than 1e-5 of the probability for 2**18 tokens.

**Random numbers.** One uniform number for each (seed, position), from Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed, counter = position. There is no state
to carry or lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gapless.sampling import SamplingParams
from gapless.step import TokenLogprobs

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

LARGEST = float(np.float32(1e30))
LOWEST_Z = -24.5  # exp of it rounds to 0 quanta
QUANTUM = 2.0**-34
QUANTUM_SHIFT = 2.0**-11  # adding it to a float32 below it rounds to a multiple of QUANTUM
MAX_VOCAB = 1 << 19

# exp(r) on |r| <= ln2 / 2, highest power first, and ln2 in two parts: the coefficients of Cephes' expf.
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG2_E = 1.44269504088896341
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
ROUND_TO_INT = 12582912.0  # 1.5 * 2**23: adding and subtracting it rounds a small float32 to an integer

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10


def philox4x32(key: int, counter: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a 64-bit key and a 128-bit counter, low words first."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, (key >> 32) & mask
    c0, c1, c2, c3 = (counter >> shift & mask for shift in (0, 32, 64, 96))
    for _ in range(PHILOX_ROUNDS):
        a, b = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + PHILOX_WEYL[0]) & mask, (k1 + PHILOX_WEYL[1]) & mask
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of a position of a request: 53 bits of Philox's first two words."""
    w0, w1, _, _ = philox4x32(seed & 0xFFFFFFFFFFFFFFFF, position)
    return float(((w1 << 32) | w0) >> 11) * 2.0**-53


def exp_weights(z: F32) -> F32:
    """``exp(z)`` for z <= 0 as the module's docstring defines it: a multiple of 2**-34, NaN giving 0."""
    f32 = np.float32
    z = np.where(z > f32(LOWEST_Z), z, f32(LOWEST_Z))
    n = (z * f32(LOG2_E) + f32(ROUND_TO_INT)) - f32(ROUND_TO_INT)
    r = (z - n * f32(LN2_HIGH)) - n * f32(LN2_LOW)
    p = np.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = p * r + f32(coefficient)
    p = (p * (r * r) + r) + f32(1.0)
    w = p * ((n.astype(np.int32) + 127) << 23).view(np.float32)
    shift = f32(QUANTUM_SHIFT)
    return np.where(w < shift, (w + shift) - shift, w)


def inverse_temperature(temperature: float) -> np.float32:
    """1 / T in float32, held finite so that 0 times it is 0. ``temperature`` > 0."""
    return np.float32(min(1.0 / temperature, LARGEST))


def clean(x: F32) -> F32:
    """Logits held within +-1e30, where no later product or difference overflows; NaN and lower ones are -inf."""
    return np.where(x >= np.float32(-LARGEST), np.minimum(x, np.float32(LARGEST)), np.float32(-np.inf))


def adjust(
    logits: F32,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    suppress: Sequence[int] = (),
) -> F32:
    """Logits [V] after penalties, bias and suppression. Ids outside of the vocabulary are passed over."""
    f32 = np.float32
    x = clean(logits)
    vocab = x.size
    used = np.zeros(vocab, dtype=bool)
    used[_inside(prompt_ids, vocab)] = True
    output = _inside(output_ids, vocab)
    used[output] = True
    counts = np.bincount(output, minlength=vocab)
    if params.repetition_penalty != 1.0:
        penalty = f32(params.repetition_penalty)
        x = np.where(used, np.where(x > 0, x / penalty, x * penalty), x)
    x = np.where(counts > 0, x - f32(params.frequency_penalty) * counts.astype(np.float32), x)
    x = clean(np.where(counts > 0, x - f32(params.presence_penalty), x))
    with np.errstate(over="ignore", invalid="ignore"):
        for token, bias in params.logit_bias.items():
            if 0 <= token < vocab:
                x[token] += f32(bias)
    x = clean(x)
    x[_inside(suppress, vocab)] = -np.inf
    return x


def sample_row(
    logits: F32,
    params: SamplingParams,
    seed: int,
    position: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    suppress: Sequence[int] = (),
) -> tuple[int, TokenLogprobs | None]:
    """Choose the token of one position.

    Args:
        logits: float32 [V], V at most 2**19.
        seed, position: name the uniform number; ``position`` is the one that the new token takes.
        prompt_ids, output_ids: what the penalties look at.
        suppress: ids that may not be chosen (the caller passes them while ``min_tokens`` is not reached).

    Returns the token and, where ``params.logprobs`` is not None, log-probabilities: at most ``logprobs`` of
    them, fewer where fewer tokens have a finite logit. A row without a finite logit gives the lowest id that
    is not suppressed (0 if all are).
    """
    x = adjust(logits, params, prompt_ids, output_ids, suppress)
    largest = x.max()
    if np.isneginf(largest):
        allowed = np.ones(x.size, dtype=bool)
        allowed[_inside(suppress, x.size)] = False
        token = int(np.argmax(allowed))
    elif params.greedy:
        token = int(np.argmax(x))
    else:
        token = _draw(_filtered_weights(x, params), uniform(seed, position))
    return token, None if params.logprobs is None else _logprobs(x, token, params.logprobs)


def _inside(ids: Sequence[int], vocab: int) -> I64:
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    return array[(array >= 0) & (array < vocab)]


def _order(x: F32) -> I64:
    """Ids by falling logit, lower ids first among equals."""
    return np.argsort(-x, kind="stable").astype(np.int64)


def _filtered_weights(x: F32, params: SamplingParams) -> F64:
    """Weights [V], 0 where a filter dropped the token."""
    with np.errstate(over="ignore"):
        w = exp_weights((x - x.max()) * inverse_temperature(params.temperature)).astype(np.float64)
    order = _order(x)
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = np.cumsum(w[order])
        order = order[: int(np.searchsorted(mass, params.top_p * mass[-1], side="left")) + 1]
    kept = np.zeros_like(w)
    kept[order] = w[order]
    return np.where(kept >= np.float32(params.min_p), kept, 0.0)


def _draw(weights: F64, u: float) -> int:
    """The first id whose cumulative weight exceeds u times the whole."""
    mass = np.cumsum(weights)
    return int(np.searchsorted(mass, u * mass[-1], side="right"))


def _logprobs(x: F32, token: int, n_top: int) -> TokenLogprobs:
    largest = x.max()
    if np.isneginf(largest):
        return TokenLogprobs(-math.inf, (), ())
    total = exp_weights(x - largest).astype(np.float64).sum()
    values = (x.astype(np.float64) - float(largest)) - math.log(total)
    top = [i for i in _order(x)[:n_top].tolist() if np.isfinite(x[i])]
    return TokenLogprobs(float(values[token]), tuple(top), tuple(float(values[i]) for i in top))
