"""JSON lines between `cpu_peers.py` and an engine's process. Standard library only: every venv runs it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1


@dataclass
class Timing:
    """What one measured case took, in seconds; `decode_tokens` is of the whole batch without first tokens."""

    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int

    def to_json(self) -> dict[str, float]:
        decode = self.decode_tokens / self.decode_s if self.decode_tokens else 0.0
        return {
            "prefill_tokens_per_s": self.prefill_tokens / self.prefill_s,
            "decode_tokens_per_s": decode,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
        }


class Engine(Protocol):
    def run(self, prompts: list[list[int]], output_tokens: int) -> Timing: ...


def claim_stdout() -> Any:
    """Keep the real stdout for the protocol and send what libraries print to stderr, the worker's log."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return channel


def die_with_parent() -> None:
    """A worker is stopped while idle, so it would never see its input close: the kernel must end it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(engine: Engine, channel: Any, info: dict[str, Any]) -> None:
    """Answer each request until the input closes. Every request is warmed up with prompts like its own."""
    channel.write(json.dumps({"ready": True, **info}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.get("warm_prompts"):
                engine.run(request["warm_prompts"], request["warm_tokens"])
            reply = engine.run(request["prompts"], request["output_tokens"]).to_json()
        except Exception as error:  # the parent decides whether to go on without this engine
            reply = {"error": f"{type(error).__name__}: {error}"}
        channel.write(json.dumps(reply) + "\n")
