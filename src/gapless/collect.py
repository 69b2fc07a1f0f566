"""From a request's tokens to its answer: text, stop strings, times."""

from __future__ import annotations

import time
from collections.abc import Callable

from gapless.engine import Sink
from gapless.outputs import Completion, StreamPiece
from gapless.request import FinishReason
from gapless.sampling import SamplingParams
from gapless.step import TokenLogprobs
from gapless.text.stream import Detokenizer, StopStrings
from gapless.text.tokenizer import Tokenizer


class Collector(Sink):
    """Collects one sample of a prompt.

    Args:
        tokenizer: the model's.
        sampling: the request's.
        index: of the sample.
        deliver: takes each piece on the engine's thread; the last one has a finish reason. Must not block.
        live: whether pieces are wanted as they come, and not only the last one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        index: int,
        deliver: Callable[[StreamPiece], None],
        *,
        live: bool,
    ) -> None:
        self.error: Exception | None = None
        self._completion = Completion(index, logprobs=None if sampling.logprobs is None else [])
        self._tokenizer = tokenizer
        self._min_tokens = sampling.min_tokens
        self._deliver = deliver
        self._live = live
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        # Without readers or stop strings the text is made once, at the end, by whoever asks for it.
        self._detokenizer = Detokenizer(tokenizer, continues=True) if live or self._stops is not None else None
        self._shown: list[str] = []
        self._unreported: list[int] = []
        self._started = time.perf_counter()

    @property
    def completion(self) -> Completion:
        """The answer; complete once the last piece has been delivered."""
        c = self._completion
        c.text = (
            self._tokenizer.decode(c.token_ids, continues=True) if self._detokenizer is None else "".join(self._shown)
        )
        return c

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        c = self._completion
        c.last_token_s = time.perf_counter() - self._started
        if c.first_token_s is None:
            c.first_token_s = c.last_token_s
        c.token_ids.append(token)
        if c.logprobs is not None and logprobs is not None:
            c.logprobs.append(logprobs)
        if self._detokenizer is None:
            return False
        if self._live:
            self._unreported.append(token)
        self._show(self._watched(self._detokenizer.push(token)))
        return self._stopped

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        self.error = error
        try:
            if self._show_rest():
                reason = "stop"
        except Exception as problem:  # no text can be made of it; whoever waits must hear of the end all the same
            self.error, reason = error or problem, "error"
        self._completion.finish_reason = reason
        self._send("", reason)

    def _show_rest(self) -> bool:
        """Whether what the detokenizer held back completes a stop string; what is held of one is text after all."""
        if self._detokenizer is None or self._stopped:
            return False
        self._show(self._watched(self._detokenizer.flush()))
        if self._stops is not None and not self._stopped:
            self._show(self._stops.flush())
        return self._stopped

    @property
    def _stopped(self) -> bool:
        return self._stops is not None and self._stops.found is not None

    def _watched(self, piece: str) -> str:
        """The part of new text that can be shown. Stop strings count once there are ``min_tokens``."""
        if self._stops is None:
            return piece
        if len(self._completion.token_ids) <= self._min_tokens:
            return self._stops.flush() + piece
        return self._stops.push(piece)

    def _show(self, piece: str) -> None:
        self._shown.append(piece)
        if piece and self._live:
            self._send(piece, None)

    def _send(self, piece: str, reason: FinishReason | None) -> None:
        tokens, self._unreported = tuple(self._unreported), []
        self._deliver(StreamPiece(self._completion.index, piece, tokens, reason))
