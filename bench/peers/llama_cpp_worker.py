"""llama.cpp as a worker, by llama-cpp-python's low-level API; also scores a text and requantises a file."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as lc
import numpy as np
from protocol import Timing, claim_stdout, die_with_parent, serve

FTYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
UBATCH = 512


@lc.llama_log_callback
def _errors_only(level: int, text: bytes, _data: Any) -> None:
    if level >= 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        lc.llama_log_set(_errors_only, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self._model = lc.llama_model_load_from_file(model.encode(), lc.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._threads = threads
        self._vocab = lc.llama_model_get_vocab(self._model)
        self.n_vocab = lc.llama_vocab_n_tokens(self._vocab)

    def context(self, sequences: int, tokens: int, batch: int, flash: bool = True) -> Any:
        params = lc.llama_context_default_params()
        # Without a unified cache each sequence attends to its own part alone: much faster for large batches.
        params.n_seq_max, params.kv_unified = sequences, False
        params.n_ctx = sequences * (-(-tokens // 256) * 256)
        params.n_batch, params.n_ubatch = max(batch, UBATCH), UBATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = int(flash)
        context = lc.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {sequences} times {tokens} tokens")
        return context

    def run(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        """Flash attention is faster but for one long sequence: for one, both ways run and the best counts."""
        timing = self._run(prompts, output_tokens, flash=True)
        if len(prompts) == 1:
            plain = self._run(prompts, output_tokens, flash=False)
            timing.prefill_s = min(timing.prefill_s, plain.prefill_s)
            timing.decode_s = min(timing.decode_s, plain.decode_s)
        return timing

    def _run(self, prompts: list[list[int]], output_tokens: int, *, flash: bool) -> Timing:
        size = sum(map(len, prompts))
        longest = max(map(len, prompts)) + output_tokens
        context = self.context(len(prompts), longest, size, flash)
        batch = Batch(size, [len(prompt) for prompt in prompts])
        try:
            start = time.perf_counter()
            batch.prefill(prompts)
            tokens = self._step(context, batch, len(prompts))
            first = time.perf_counter()
            batch.begin_decode()
            for _ in range(output_tokens - 1):
                batch.advance(tokens)
                tokens = self._step(context, batch, len(prompts))
            end = time.perf_counter()
        finally:
            batch.free()
            lc.llama_free(context)
        return Timing(first - start, size, end - first, len(prompts) * (output_tokens - 1))

    def logits(self, context: Any, rows: int) -> np.ndarray:
        return np.ctypeslib.as_array(lc.llama_get_logits(context), shape=(rows, self.n_vocab))

    def _step(self, context: Any, batch: Batch, rows: int) -> np.ndarray:
        check(lc.llama_decode(context, batch.raw))
        return self.logits(context, rows).argmax(axis=1)  # greedy, as cheaply as Python can

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        out = (lc.llama_token * (len(data) + 8))()
        count = lc.llama_tokenize(self._vocab, data, len(data), out, len(out), True, False)
        return list(out[:count])

    def score(self, ids: list[int]) -> list[float]:
        """The log probability of each of ids[1:] given all that came before it."""
        context = self.context(1, len(ids), UBATCH)
        result: list[float] = []
        try:
            for begin in range(0, len(ids) - 1, UBATCH):
                end = min(begin + UBATCH, len(ids) - 1)
                result += self._score_chunk(context, ids, begin, end)
        finally:
            lc.llama_free(context)
        return result

    def _score_chunk(self, context: Any, ids: list[int], begin: int, end: int) -> list[float]:
        batch = Batch(end - begin, [])
        batch.chunk(ids[begin:end], begin)
        try:
            check(lc.llama_decode(context, batch.raw))
            rows = self.logits(context, end - begin).astype(np.float64)
        finally:
            batch.free()
        rows -= rows.max(axis=1, keepdims=True)
        chosen = rows[np.arange(end - begin), ids[begin + 1 : end + 1]]
        return list((chosen - np.log(np.exp(rows).sum(axis=1))).tolist())


class Batch:
    """A llama_batch with numpy views of its arrays: filling them must cost nothing beside a step."""

    def __init__(self, size: int, lengths: list[int]) -> None:
        self.raw = lc.llama_batch_init(size, 0, 1)
        self._lengths = lengths
        self._token = np.ctypeslib.as_array(self.raw.token, shape=(size,))
        self._pos = np.ctypeslib.as_array(self.raw.pos, shape=(size,))
        self._logits = np.ctypeslib.as_array(self.raw.logits, shape=(size,))
        np.ctypeslib.as_array(self.raw.n_seq_id, shape=(size,))[:] = 1

    def prefill(self, prompts: list[list[int]]) -> None:
        """All prompts one after another, with logits for the last token of each."""
        at = 0
        for sequence, prompt in enumerate(prompts):
            end = at + len(prompt)
            self._token[at:end], self._pos[at:end] = prompt, range(len(prompt))
            self._logits[at:end] = 0
            self._logits[end - 1] = 1
            for row in range(at, end):
                self.raw.seq_id[row][0] = sequence
            at = end
        self.raw.n_tokens = at

    def begin_decode(self) -> None:
        """From here on one token a step for every sequence."""
        count = len(self._lengths)
        for row in range(count):
            self.raw.seq_id[row][0] = row
        self._pos[:count] = np.array(self._lengths) - 1
        self._logits[:count] = 1
        self.raw.n_tokens = count

    def advance(self, tokens: np.ndarray) -> None:
        count = len(self._lengths)
        self._pos[:count] += 1
        self._token[:count] = tokens

    def chunk(self, tokens: list[int], begin: int) -> None:
        """A piece of one sequence with logits for every token."""
        self._token[:], self._pos[:] = tokens, range(begin, begin + len(tokens))
        self._logits[:] = 1
        for row in range(len(tokens)):
            self.raw.seq_id[row][0] = 0
        self.raw.n_tokens = len(tokens)

    def free(self) -> None:
        lc.llama_batch_free(self.raw)


def check(code: int) -> None:
    if code:
        raise RuntimeError(f"llama_decode returned {code}")


def quantize(source: str, target: str, ftype: str) -> None:
    """Made from a file that is quantised already: good for speed, not for judging quality."""
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FTYPES[ftype], True
    if lc.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot requantise {source} to {ftype}")


def score_text(model: str, threads: int, text: Path, window: int, limit: int) -> dict[str, Any]:
    engine = LlamaCpp(model, threads)
    ids = engine.tokenize(text.read_text(encoding="utf-8"))[:limit]
    windows = [ids[at : at + window] for at in range(0, len(ids), window)]
    windows = [part for part in windows if len(part) == window]
    if not windows:
        raise RuntimeError(f"the text has {len(ids)} tokens, fewer than one window of {window}")
    return {"windows": windows, "logprobs": [engine.score(part) for part in windows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantize", nargs=2, metavar=("TARGET", "FTYPE"))
    parser.add_argument("--score", type=Path, metavar="TEXT")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=4096)
    args = parser.parse_args()
    die_with_parent()
    channel = claim_stdout()
    if args.quantize:
        quantize(args.model, *args.quantize)
    elif args.score:
        result = score_text(args.model, args.threads, args.score, args.window, args.limit)
        channel.write(json.dumps(result) + "\n")
    else:
        engine = LlamaCpp(args.model, args.threads)
        features = lc.llama_print_system_info().decode()
        serve(engine, channel, {"version": lc.__version__, "features": features})


if __name__ == "__main__":
    main()
