"""Measure a model on this machine: what it reaches, beside what the machine could."""

from __future__ import annotations

import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gapless import __version__
from gapless.ceilings import Ceilings
from gapless.energy import EnergyMeter
from gapless.engine import Engine, EngineStats, Sink
from gapless.errors import RequestError
from gapless.kernels.count import StepCounter
from gapless.ledger import file as ledger_files
from gapless.ledger.accounts import Account
from gapless.ledger.budget import WaitingBudget
from gapless.ledger.ledger import Ledger
from gapless.ledger.report import summary
from gapless.llm import LLM
from gapless.request import FinishReason
from gapless.sampling import SamplingParams
from gapless.step import TokenLogprobs

FIRST_ID = 100  # ids below are the special ones of most vocabularies


@dataclass(frozen=True)
class Run:
    """One run of a batch.

    Attributes:
        prefill_tokens_per_s: prompt tokens over the time until every request has its first token.
        decode_tokens_per_s: tokens of the steps in which every request decodes, over their time; 0 if there are none.
        prefill_s: until every request has its first token.
        decode_s: from then to the last token of all.
        decode_tokens: that come in that time.
        ttft_s: mean time to first token.
        tpot_s: time per token of a request while every request decodes; 0 if no step has them all.
        request_tpot_s: mean over requests of the time per token after the first, with whatever ran beside them.
        host_share: time outside the executor over time in the engine's loop.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_s: float
    decode_s: float
    decode_tokens: int
    ttft_s: float
    tpot_s: float
    request_tpot_s: float
    host_share: float


class _Clock(Sink):
    """When the tokens of a request come: in which step, and at what time."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self.steps: list[int] = []
        self.times: list[float] = []
        self.done = False
        self.error: Exception | None = None

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        self.steps.append(self._stats.steps)
        self.times.append(time.perf_counter())
        return False

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        self.done, self.error = True, error


def run_once(llm: LLM, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
    """Run the prompts together, each to exactly ``output_tokens`` tokens, greedily.

    Raises RequestError if they do not fit the context, or cannot all run at once.
    """
    engine: Engine = llm.engine
    sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    _check_room(llm, len(prompts), max(map(len, prompts)), output_tokens)
    clocks = [_Clock(engine.stats) for _ in prompts]
    landed: dict[int, float] = {}
    before = (engine.stats.busy_s, engine.stats.executor_s)
    started = time.perf_counter()
    for prompt, clock in zip(prompts, clocks, strict=True):
        engine.submit(prompt, sampling, [clock])
    with engine.driving:
        while engine.has_work:
            engine.step()
            landed[engine.stats.steps] = time.perf_counter()
        engine.book()
    for clock in clocks:
        if clock.error is not None:
            raise clock.error
    busy, inside = engine.stats.busy_s - before[0], engine.stats.executor_s - before[1]
    return _summary(clocks, landed, started, sum(map(len, prompts)), 1.0 - inside / busy)


def _check_room(llm: LLM, batch: int, prompt_tokens: int, output_tokens: int) -> None:
    """A batch whose requests wait for one another measures neither prompts nor steps of that batch."""
    limit, total = llm.scheduler.validate(prompt_tokens), prompt_tokens + output_tokens
    if total > limit:
        raise RequestError(
            f"prompt-tokens + output-tokens = {total} exceeds the context of {limit}",
            f"lower them{llm.scheduler.context_remedy}",
        )
    if batch > llm.scheduler.max_running:
        raise RequestError(
            f"batch = {batch} is more than the {llm.scheduler.max_running} requests that run at once",
            "lower it or raise max-running",
        )
    capacity = llm.executor.capacity
    pages, of_prompt = -(-total // capacity.page_tokens), -(-prompt_tokens // capacity.page_tokens)
    # A request is admitted where each of the others has a page to grow into.
    needed, there = max(batch * pages, batch * (of_prompt + 1) - 1), capacity.n_pages
    if needed > there:
        megabytes = math.ceil(needed * getattr(llm.executor, "kv_bytes", 0) / there / 1e6)
        raise RequestError(
            f"batch = {batch} requests of {total} tokens do not fit the cache together: it holds {there} pages of "
            f"{capacity.page_tokens} tokens and they need {needed}",
            "lower batch or tokens" + (f", or raise kv-memory to {megabytes}MB" if megabytes else ""),
        )


def _summary(
    clocks: Sequence[_Clock], landed: Mapping[int, float], started: float, prompt_tokens: int, host_share: float
) -> Run:
    first = max(c.times[0] for c in clocks)
    last = max(c.times[-1] for c in clocks)
    late = sum(t > first for c in clocks for t in c.times)
    gaps = [(c.times[-1] - c.times[0]) / (len(c.times) - 1) for c in clocks if len(c.times) > 1]
    begun, ended = max(c.steps[0] for c in clocks), min(c.steps[-1] for c in clocks)
    together = sum(begun < step <= ended for c in clocks for step in c.steps)
    together_s = landed[ended] - landed[begun]
    return Run(
        prefill_tokens_per_s=prompt_tokens / (first - started),
        decode_tokens_per_s=together / together_s if together else 0.0,
        prefill_s=first - started,
        decode_s=last - first,
        decode_tokens=late,
        ttft_s=statistics.fmean(c.times[0] - started for c in clocks),
        tpot_s=together_s * len(clocks) / together if together else 0.0,
        request_tpot_s=statistics.fmean(gaps) if gaps else 0.0,
        host_share=host_share,
    )


def benchmark(
    llm: LLM, *, batch: int, prompt_tokens: int, output_tokens: int, runs: int, measure: Callable[[], Ceilings],
    seed: int | None = None, books: bool = True, ledger_file: Path | None = None, budget: WaitingBudget | None = None,
    meter: EnergyMeter | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Medians and spreads of ``runs`` runs with fresh random prompts, after one that warms up; then floors and sizes.

    Where no step has all requests decoding there is no decode rate and no time per token: they are None.

    Args:
        measure: gives the machine's ceilings. They are measured before the runs and after: others may take from one
            measurement what they leave to the runs, and a ceiling is the most that was reached.

        books: whether a ledger is kept of the runs.
        ledger_file: where it is written.
        budget: that the books are held against.
        meter: of the energy used.

    Raises:
        GaplessError: there is to be a file, and the executor keeps no time of its steps.
        LedgerFileError: the file cannot be written.
        RequestError: the tokens of a request do not fit the context, or the requests do not fit the cache together; or
            the floor of a step is above the budget.
    """
    _check_room(llm, batch, prompt_tokens, output_tokens)  # before prompts of any length are drawn
    rng = random.Random(seed)
    ids = range(min(FIRST_ID, llm.spec.vocab_size - 1), llm.spec.vocab_size)

    def prompts() -> list[list[int]]:
        return [rng.choices(ids, k=prompt_tokens) for _ in range(batch)]

    if ledger_file is not None:
        llm.check_stamped()
    before = measure()
    if budget is not None:
        _check_budget(budget, before, llm.executor.counter, batch, prompt_tokens + output_tokens // 2)
    run_once(llm, prompts(), min(output_tokens, 8))
    ledger = llm.keep_books(before, meter) if books and llm.executor.profile is not None else None
    recorder = None if ledger is None or ledger_file is None else ledger_files.Recorder(ledger)
    results = []
    for _ in range(runs):
        results.append(run_once(llm, prompts(), output_tokens))
        if recorder is not None:
            recorder.end_run()
    llm.engine.ledger = None
    if recorder is not None and ledger_file is not None:
        facts = _facts(llm, batch, prompt_tokens, output_tokens, runs, recorder.ledger)
        ledger_files.write(ledger_file, recorder.recorded(facts))
    ceilings = before.highest(measure())
    medians, spread = _medians(results)
    return {
        "model": llm.name,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "runs": runs,
        **medians,
        "spread": spread,
        **_floors(llm.executor.counter, medians, batch, prompt_tokens, output_tokens, ceilings),
        "ledger": None if ledger is None else summary(ledger, budget),
        "weights_bytes": held_bytes(llm),
        "kv_bytes": getattr(llm.executor, "kv_bytes", 0),
        "threads": _threads(llm),
        "isa": getattr(llm.executor, "isa", None),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _check_budget(budget: WaitingBudget, ceilings: Ceilings, counter: StepCounter, batch: int, context: int) -> None:
    """Before anything is run: nobody should wait for what cannot be. Raises RequestError."""
    work = counter.count([(context, 1)] * batch).total
    bound = Account.COMPUTE if ceilings.bound(work) == "arithmetic" else Account.WEIGHTS
    budget.shared({bound: ceilings.floor_s(work)})


def _facts(
    llm: LLM, batch: int, prompt_tokens: int, output_tokens: int, runs: int, ledger: Ledger
) -> ledger_files.Facts:
    return ledger_files.Facts(
        model=llm.name.encode(errors="replace").decode(),  # a path need not be text
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        runs=runs,
        threads=_threads(llm),
        isa=getattr(llm.executor, "isa", None),
        ceilings=ledger.ceilings,
        gapless=__version__,
        source=ledger.source,
        meters=() if ledger.meter is None else ledger.meter.parts,
        settings=_settings(llm),
    )


def _settings(llm: LLM) -> dict[str, int | str]:
    """What else times may depend on."""
    held = {name: getattr(llm.executor, name, None) for name in ("kv_dtype", "kv_bytes", "weights_bytes")}
    return {
        "max_running": llm.scheduler.max_running,
        "max_step_tokens": llm.scheduler.max_step_tokens,
        "depth": llm.executor.depth,
        **{name: value for name, value in held.items() if value is not None},
    }


def _threads(llm: LLM) -> int:
    return int(getattr(llm.executor, "n_threads", 1))


_SHOWN = tuple(field.name for field in fields(Run) if field.name not in ("decode_s", "decode_tokens"))
_OF_DECODING = ("decode_tokens_per_s", "tpot_s", "request_tpot_s")


def _medians(results: Sequence[Run]) -> tuple[dict[str, float | None], dict[str, list[float] | None]]:
    """Of each figure the median, and the least and the greatest; None for what no run has."""
    figures = {name: [float(getattr(r, name)) for r in results] for name in _SHOWN}
    for name in _OF_DECODING:
        figures[name] = [value for value in figures[name] if value]
    medians = {name: statistics.median(values) if values else None for name, values in figures.items()}
    return medians, {name: [min(values), max(values)] if values else None for name, values in figures.items()}


def _floors(
    counter: StepCounter, medians: Mapping[str, float | None], batch: int, prompt_tokens: int, output_tokens: int,
    ceilings: Ceilings,
) -> dict[str, Any]:  # fmt: skip
    """The floors of a decode step in the middle of the output, and of the prompts as one step; shares reached."""
    decode = counter.count([(prompt_tokens + output_tokens // 2, 1)] * batch).total
    prefill = counter.count([(0, prompt_tokens)] * batch).total
    tpot_s, prefill_s = medians["tpot_s"], medians["prefill_s"]
    return {
        "floor_tpot_s": ceilings.floor_s(decode),
        "floor_share": ceilings.floor_s(decode) / tpot_s if tpot_s else None,
        "bound": ceilings.bound(decode),
        "step_bytes": decode.memory_bytes,
        "step_flops": decode.flops,
        "floor_prefill_s": ceilings.floor_s(prefill),
        "prefill_floor_share": ceilings.floor_s(prefill) / prefill_s if prefill_s else None,
        "prefill_bound": ceilings.bound(prefill),
        "memory_bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        "int8_ops_per_s": ceilings.int8_ops_per_s,
    }


def held_bytes(llm: LLM) -> int:
    """Bytes of the weights as the executor holds them."""
    return int(getattr(llm.executor, "weights_bytes", llm.model.weights_bytes))
