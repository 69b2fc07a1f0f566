"""Write docs/where-did-my-tokens-time-go.md: every figure in it is read from a recorded run. ``--check`` compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gapless.ledger.accounts import Account
from gapless.ledger.file import Recorded, read
from gapless.ledger.shares import N_TIMES, Share
from gapless.units import format_si
from page import write_page

ROOT = Path(__file__).parents[1]
FILE = "docs/data/run.jsonl.gz"
TURNED, TURNED_TOKENS = "docs/data/turned.jsonl.gz", 64
BUDGET = "8ms"
PER_LINE = 7  # terms of a sum
LEAST_NS = 500  # shorter ones are not listed

PAGE = """# Where did my token's time go?

One real run, from the first command to what to change. It was recorded on {machine}, by

```text
gapless bench smollm2-135m --batch {batch} --prompt-tokens {prompt} --output-tokens {output} --runs {runs} \\
  --ledger-file run.jsonl.gz
```

and lies beside this page, [run.jsonl.gz](data/run.jsonl.gz). Every figure below is read from it by
`tools/time_page.py`; a test compares. What the accounts mean, and the rules by which time is booked to them, is in
[the ledger](ledger.md).

## All tokens

`gapless ledger show docs/data/run.jsonl.gz` says

```text
{show}
```

A token took {mean} on average, first tokens included. The floor beside it, {floor}, is what this machine needs at
least: the bytes over its bandwidth, {bandwidth}, or the multiply-adds over their rate, {rate}. The rest, {wait}, is
waiting.

## One first token

Request {first_request} arrived with {prompt} prompt tokens, together with {others} others. Its first token came
after {first_time}:

```text
{first_accounts}
```

{first_share} of that are `neighbours`: the prompts of the others, {beside} tokens of which were computed in the steps
that the request waited for. In the `queue` it waited until its own prompt was planned; `compute` and `weights` are its
own prompt. The accounts add up to the nanosecond:

```text
{first_sum}
```

## One token behind it

Token {token} of the same request is like most: {time}, near the median of {p50}.

```text
{accounts}
```

Its step decoded one token for each of the {batch} requests. It read {step_weights} of weights, which takes
{step_weights_s} at {bandwidth}, and {step_kv} of keys and values, {step_kv_s}. That is the floor of `weights` and `kv`
where reading bounds an operation; where arithmetic bounds it the floor is that of `compute`.

## What it cost

All {batch} tokens of the step waited for all of it, {step_time} on the device. Divided over them, this one cost
{cost_time}: {cost_weights} of the weights read, {cost_kv} of the keys and values, {cost_flops}s. The parts of all
{batch} add up to the step:

```text
{cost_sum}
```

## The slowest one

```text
{worst}
```

The median took {p50}, and this one {over} more. By account, against the mean of all tokens behind their first:

```text
{worst_accounts}
```

## Is that good enough?

It depends on what was promised. `--waiting-budget {budget}` shares a time per token over the accounts:

```text
{kept}
```

{verdict}

## Turning it

The same load with `--max-step-tokens {turned}`, recorded in [turned.jsonl.gz](data/turned.jsonl.gz), and
`gapless ledger diff docs/data/run.jsonl.gz docs/data/turned.jsonl.gz`:

```text
{diff}
```

The slowest token behind a first one takes {turned_max} now instead of {max}, but of a hundred tokens the second slowest
{turned_p99} instead of {p99}; first tokens come after {turned_ttft} instead of {ttft} on average. That is the trade:
the prompts cost the same, in a few long waits or in many short ones, and smaller steps read the weights more often. Where
long waits break the promise it pays, where the many do it does not.
"""


def main() -> None:
    write_page("where-did-my-tokens-time-go.md", PAGE.format(**figures(read(ROOT / FILE))), "time_page.py")


def figures(recorded: Recorded) -> dict[str, Any]:
    """What the page's figures are."""
    i = recorded.intervals
    of_first = np.flatnonzero((recorded.run == 0) & (i.token == 0))
    first = int(of_first[np.argmax((i.end - i.begin)[of_first])])
    token = typical_of(recorded, int(i.request[first]))
    return {
        **of_all(recorded),
        **of_the_first(recorded, first),
        **of_a_later(recorded, token),
        **of_its_cost(recorded, token),
        **of_the_slowest(recorded),
        **of_the_budget(),
        **of_the_turned(recorded, read(ROOT / TURNED)),
    }


def of_all(recorded: Recorded) -> dict[str, Any]:
    f, t = recorded.facts, recorded.totals
    return {
        "machine": f"{f.threads} cores with {f.isa}",
        "batch": f.batch,
        "prompt": f.prompt_tokens,
        "output": f.output_tokens,
        "runs": f.runs,
        "show": cli("ledger", "show", FILE).rstrip(),
        "mean": ms(t.wall_ns / t.tokens),
        "floor": ms(t.floor_ns.sum() / t.tokens),
        "wait": f"{1 - t.floor_ns.sum() / t.wall_ns:.0%}",
        "bandwidth": format_si(f.ceilings.bandwidth_bytes_per_s, "B/s"),
        "rate": format_si(f.ceilings.int8_ops_per_s, "op/s"),
    }


def of_the_first(recorded: Recorded, at: int) -> dict[str, Any]:
    """Of the first token of a request, that which came last of its run."""
    i = recorded.intervals
    length = int(i.end[at] - i.begin[at])
    return {
        "first_request": int(i.request[at]),
        "others": recorded.facts.batch - 1,
        "first_time": ms(length),
        "first_accounts": accounts(i.spent[at], i.floor[at]),
        "first_share": f"{i.spent[at, Account.NEIGHBOURS] / length:.0%}",
        "beside": f"{int(i.beside[at]):,}",
        "first_sum": summed(i.spent[at].tolist(), length),
    }


def typical_of(recorded: Recorded, request: int) -> int:
    """Of a request in the first run, the token nearest to the median of all."""
    i = recorded.intervals
    length = i.end - i.begin
    mine = np.flatnonzero((recorded.run == 0) & (i.request == request) & (i.token > 0))
    return int(mine[np.argmin(np.abs(length[mine] - median_ns(recorded)))])


def median_ns(recorded: Recorded) -> int:
    """Of the times between tokens."""
    i = recorded.intervals
    return int(np.percentile((i.end - i.begin)[i.token > 0], 50, method="inverted_cdf"))


def of_a_later(recorded: Recorded, at: int) -> dict[str, Any]:
    i, bandwidth = recorded.intervals, recorded.facts.ceilings.bandwidth_bytes_per_s
    share = i.share[step_of(recorded, at)].sum(axis=0)
    weights, kv = int(share[Share.WEIGHT_BYTES]), int(share[Share.KV_BYTES])
    return {
        "token": int(i.token[at]),
        "time": ms(i.end[at] - i.begin[at]),
        "p50": ms(median_ns(recorded)),
        "accounts": accounts(i.spent[at], i.floor[at]),
        "step_weights": format_si(weights, "B"),
        "step_weights_s": format_si(weights / bandwidth, "s"),
        "step_kv": format_si(kv, "B"),
        "step_kv_s": format_si(kv / bandwidth, "s"),
    }


def step_of(recorded: Recorded, at: int) -> Any:
    """The intervals of the step that gave a token."""
    i = recorded.intervals
    return np.flatnonzero((recorded.run == recorded.run[at]) & (i.step == i.step[at]))


def of_its_cost(recorded: Recorded, at: int) -> dict[str, Any]:
    i, s = recorded.intervals, recorded.steps
    step = int(np.flatnonzero((s.run == recorded.run[at]) & (s.step == i.step[at]))[0])
    whole = int(s.ended[step] - s.begun[step])
    parts = i.share[step_of(recorded, at), :N_TIMES].sum(axis=1)
    assert len(parts) == recorded.facts.batch, "every request has a token of it"
    assert parts.sum() == whole, "a step is the sum of its tokens"
    return {
        "step_time": ms(whole),
        "cost_time": ms(i.share[at, :N_TIMES].sum()),
        "cost_weights": format_si(int(i.share[at, Share.WEIGHT_BYTES]), "B"),
        "cost_kv": format_si(int(i.share[at, Share.KV_BYTES]), "B"),
        "cost_flops": format_si(int(i.share[at, Share.FLOPS]), "FLOP"),
        "cost_sum": summed(parts.tolist(), whole),
    }


def of_the_slowest(recorded: Recorded) -> dict[str, Any]:
    i = recorded.intervals
    length = np.where(i.token > 0, i.end - i.begin, 0)
    at = int(np.argmax(length))
    over = {a: i.spent[at, a] - i.spent[i.token > 0, a].mean() for a in Account}
    order = [a for a in sorted(over, key=lambda a: -over[a]) if abs(over[a]) >= LEAST_NS]
    lines = cli("ledger", "show", FILE).splitlines()
    return {
        "worst": next(line for line in lines if line.startswith("  run ")).strip(),
        "over": ms(length[at] - median_ns(recorded)),
        "worst_accounts": "\n".join(f"{a.label:12} {over[a] / 1e6:+8.3f} ms" for a in order),
    }


def of_the_budget() -> dict[str, Any]:
    lines = cli("ledger", "show", FILE, "--waiting-budget", BUDGET).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("budget "))
    total, advice = lines[-2], lines[-1]
    said = total[total.rindex(" ms  ") + len(" ms  ") :]
    return {
        "budget": BUDGET,
        "kept": "\n".join(lines[begin:-1]),
        "verdict": f'In all it is {said}. The report ends: "{advice}".',
    }


def of_the_turned(before: Recorded, after: Recorded) -> dict[str, Any]:
    def slowest(recorded: Recorded) -> str:
        i = recorded.intervals
        return ms((i.end - i.begin)[i.token > 0].max())

    def p99(recorded: Recorded) -> str:
        i = recorded.intervals
        return ms(np.quantile((i.end - i.begin)[i.token > 0], 0.99))

    def ttft(recorded: Recorded) -> str:
        i = recorded.intervals
        return ms((i.end - i.begin)[i.token == 0].mean())

    return {
        "turned": TURNED_TOKENS,
        "diff": cli("ledger", "diff", FILE, TURNED).rstrip(),
        "turned_max": slowest(after),
        "max": slowest(before),
        "turned_p99": p99(after),
        "p99": p99(before),
        "turned_ttft": ttft(after),
        "ttft": ttft(before),
    }


def accounts(spent: Any, floor: Any) -> str:
    """A line for each account, the largest first."""
    order = [a for a in sorted(Account, key=lambda a: -int(spent[a])) if spent[a] >= LEAST_NS]
    floors = {a: f"  floor {ms(floor[a])}" if floor[a] else "" for a in order}
    return "\n".join(f"{a.label:12} {ms(spent[a]):>10}{floors[a]}" for a in order)


def summed(parts: list[int], whole: int) -> str:
    """A sum written out."""
    terms = [f"{part:,}" for part in parts if part]
    assert sum(parts) == whole
    rows = [" + ".join(terms[n : n + PER_LINE]) for n in range(0, len(terms), PER_LINE)]
    return " +\n".join(rows) + f" = {whole:,} ns"


def ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def cli(*args: str) -> str:
    command = [sys.executable, "-m", "gapless", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
