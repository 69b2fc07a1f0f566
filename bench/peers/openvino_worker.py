"""OpenVINO GenAI as a worker: continuous batching over a GGUF file, stepped from here to time each step."""

from __future__ import annotations

import argparse
import json
import time

from protocol import Timing, claim_stdout, die_with_parent, serve


class OpenVino:
    def __init__(self, model: str, threads: int, properties: dict[str, object], cache_gb: int) -> None:
        import numpy
        import openvino
        import openvino_genai as genai

        self._numpy, self._tensor, self._genai = numpy, openvino.Tensor, genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.enable_prefix_caching = False
        # The whole batch's prompts go in one step, so that the first step is the prefill and the rest decode.
        scheduler.max_num_batched_tokens = 8192
        properties = {"INFERENCE_NUM_THREADS": threads, **properties}
        self._pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._next_id = 0

    def _add(self, prompt: list[int], output_tokens: int) -> object:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = self._tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        self._next_id += 1
        return self._pipe.add_request(self._next_id, ids, config)

    def run(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        handles = [self._add(prompt, output_tokens) for prompt in prompts]
        start = time.perf_counter()
        self._pipe.step()
        first = time.perf_counter()
        steps = 0
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            steps += 1
        end = time.perf_counter()
        made = [len(handle.read_all()[0].generated_ids) for handle in handles]
        if set(made) != {output_tokens} or steps != output_tokens - 1:
            raise RuntimeError(f"wanted {output_tokens} tokens in as many steps, got {made} in {steps + 1}")
        return Timing(first - start, sum(map(len, prompts)), end - first, len(prompts) * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--properties", type=json.loads, default={}, help="OpenVINO's, a JSON object")
    args = parser.parse_args()
    die_with_parent()
    channel = claim_stdout()
    engine = OpenVino(args.model, args.threads, args.properties, args.cache_gb)
    import openvino_genai

    serve(engine, channel, {"version": openvino_genai.__version__})


if __name__ == "__main__":
    main()
