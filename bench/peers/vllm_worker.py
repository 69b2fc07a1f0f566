"""vLLM's CPU build as a worker. It takes a Hugging Face folder, which `gguf_to_hf.py` makes from the GGUF."""

from __future__ import annotations

import argparse
import os
from typing import Any

from protocol import Timing, claim_stdout, die_with_parent, serve


class Vllm:
    def __init__(self, model: str, threads: int, dtype: str, cache_gb: int) -> None:
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gb)
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm

        self._vllm = vllm
        # Log statistics are what carries each request's own time stamps.
        self._llm = vllm.LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            max_model_len=2048,
            max_num_batched_tokens=4096,
            max_num_seqs=64,
        )

    def run(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        made = {len(output.outputs[0].token_ids) for output in outputs}
        if made != {output_tokens}:
            raise RuntimeError(f"wanted {output_tokens} tokens each, got {sorted(made)}")
        stats = [output.metrics for output in outputs]
        start = min(stat.scheduled_ts for stat in stats)
        first = max(stat.first_token_ts for stat in stats)
        end = max(stat.last_token_ts for stat in stats)
        return Timing(first - start, sum(map(len, prompts)), end - first, len(prompts) * (output_tokens - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-gb", type=int, default=2)
    args = parser.parse_args()
    die_with_parent()
    channel = claim_stdout()
    engine = Vllm(args.model, args.threads, args.dtype, args.cache_gb)
    import vllm

    serve(engine, channel, {"version": vllm.__version__})


if __name__ == "__main__":
    main()
