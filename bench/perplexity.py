"""Perplexity of a public-domain text: gapless against llama.cpp on the same file, token ids and windows.

Each window is scored on its own and starts without context. Both engines quantise activations, each in its own
way, so a small difference either way is expected; a large one means that something is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from peers.install import HERE, install, python_of

TEXT = Path(__file__).parent / "data" / "alice.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--text", type=Path, default=TEXT, help="(%(default)s)")
    parser.add_argument("--window", type=int, default=2048, help="tokens of one full context (%(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to use (%(default)s)")
    parser.add_argument("--work-dir", type=Path, default=Path("~/.cache/gapless-bench"), help="(%(default)s)")
    parser.add_argument("--skip-ours", action="store_true", help="llama.cpp alone")
    parser.add_argument("--tolerance", type=float, help="fail if ours is worse by more than this share")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def llama_cpp_scores(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The windows' token ids, by llama.cpp's own tokenizer, and its log probabilities."""
    work = args.work_dir.expanduser()
    install(work, "llama-cpp")
    threads = len(os.sched_getaffinity(0))
    command = [str(python_of(work, "llama-cpp")), str(HERE / "llama_cpp_worker.py"), "--model", str(model)]
    command += ["--threads", str(threads), "--score", str(args.text)]
    command += ["--window", str(args.window), "--limit", str(args.tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def gapless_scores(model: Path, windows: list[list[int]]) -> list[list[float]]:
    from gapless import LLM

    llm = LLM(str(model))
    scores = [np.asarray(llm.score(window), dtype=np.float64) for window in windows]
    for window, score in zip(windows, scores, strict=True):
        if score.shape != (len(window) - 1,):
            raise SystemExit(f"score() gave {score.shape} log probabilities for {len(window)} tokens")
        if not np.isfinite(score).all():
            raise SystemExit("score() gave log probabilities that are not finite")
    return [score.tolist() for score in scores]


def perplexity(logprobs: list[list[float]]) -> float:
    flat = [value for window in logprobs for value in window]
    return math.exp(-math.fsum(flat) / len(flat))


def compare(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, float]:
    """Both perplexities, and how far single tokens are apart, which a lucky mean can hide."""
    gap = np.abs(np.concatenate([np.array(ours[i]) - np.array(theirs[i]) for i in range(len(ours))]))
    mine, other = perplexity(ours), perplexity(theirs)
    return {
        "gapless": mine,
        "llama_cpp": other,
        "relative_difference": mine / other - 1,
        "mean_logprob_gap": float(gap.mean()),
        "largest_logprob_gap": float(gap.max()),
    }


def main() -> None:
    args = arguments()
    model = args.model.expanduser().resolve()
    if not model.is_file():
        raise SystemExit(f"there is no model file {model}")
    reference = llama_cpp_scores(args, model)
    windows, theirs = reference["windows"], reference["logprobs"]
    result: dict[str, Any] = {"windows": len(windows), "window": args.window, "text": args.text.name}
    if args.skip_ours:
        result["llama_cpp"] = perplexity(theirs)
    else:
        result |= compare(gapless_scores(model, windows), theirs)
    if args.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{key}: {value}" for key, value in result.items()))
    if args.tolerance is not None and result.get("relative_difference", 0.0) > args.tolerance:
        sys.exit(f"gapless is worse than llama.cpp by more than {args.tolerance:.2%}")


if __name__ == "__main__":
    main()
