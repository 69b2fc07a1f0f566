"""Write docs/ledger.md with the accounts as the program has them. ``--check`` compares only."""

from __future__ import annotations

import sys
from pathlib import Path

from gapless.ledger.accounts import ACCOUNTS

TARGET = Path(__file__).parents[1] / "docs" / "ledger.md"
HEAD = """# The ledger

Every interval between two tokens of a request is booked wholly to accounts, in nanoseconds that add up: from when its
reader had the token before (for the first one: from the request's arrival) to when its reader has it. `gapless bench`
prints the books of its runs, and `gapless generate --ledger` those of its answers.

Made by `tools/ledger_reference.py` from the table in `gapless.ledger.accounts`.

## Accounts

| account | what is booked to it | floor | when it is large |
|---|---|---|---|
"""
TAIL = """
## The critical path

Books follow what the token really waited for. In the picture two steps are in flight; `p` is planning, `d`
delivering.

```text
host      p2 |    d1 p3      |        d2 p4
device    [---- step 1 ----][---- step 2 ----][---- step 3
                        ^ token 1               ^ token 2
token 2                 |<- step 2 ---->|<-d2->|
                          its accounts   tail
```

- While a step of the request runs on the device, the step's own accounts are booked.
- Before it, while the device does not run, what the host did then is booked (`schedule`, `prepare`, `launch`); while
  it runs a step of others only, `neighbours`.
- Behind the last step of the interval, until the token can be used, what the host did is booked, whatever the device
  does by then; from there until the reader has the token, `deliver`.
- What the host does while the device runs (`p3` above) is on nobody's path: it is *hidden*, and shown apart.
- Until its first step is planned a request is in the `queue`; thrown out of the cache it is `preempted` until it has
  been computed as far as it was.

## Inside a step

Every thread stamps the processor's counter when it is done with an operation, before it waits for the others. The
time of an operation, the mean over threads, goes to what bounds it: `weights` or `kv` where its bytes over the
measured bandwidth exceed its FLOPs over the measured rate, else `compute`. The mean time for which threads waited is
`sync`, and what no operation holds is `launch`.

Where prompts of others ran in the step, an operation's time is divided as its floor is: the part that the roofline
gives to the step without those prompts stays with the request, and the rest is `neighbours`. Tokens that decode
beside each other are no neighbours in this sense: each waits for all that the step reads.

## What a program gets

`gapless bench --json` has under `ledger` the number of `tokens` booked, `wall_seconds` and for each account `seconds`,
`floor_seconds`, `ttft_seconds`, `tpot_seconds`, `tpot_floor_seconds`, `bytes`, `flops`, `joules` and `source`. Seconds
are sums over tokens and add up to `wall_seconds`; `ttft_seconds` is the mean of first tokens, `tpot_seconds` (and its
floor) that of the tokens behind them. Bytes and FLOPs are those of the steps, once each, however many tokens shared
them. `joules` is null where nothing measures them. `hidden_seconds` is what the host did while the device ran, `worst`
the tokens that were waited for longest.

## The triangle

Three things can hold a token up in the end: arithmetic (`compute`), moving bytes (`weights`, `kv`, `link`, `network`),
and heat or power (`throttle`). Under `triangle` stand the shares of these corners of the floor, and of what was spent
above it; what lies in no corner is `others`. The corner with most of the floor binds: no tuning takes a token below it.

## How it grows

`gapless bench --sweep context` (or `batch`, or `prompt`) measures at several lengths and prints for each account the
time of a token there, and by least squares what a thousand tokens more (or one request more) cost. `--csv` writes
the points; `--plot` draws the accounts one upon the other (`pip install 'gapless[plot]'`).
"""


def reference() -> str:
    rows = [f"| `{a.label}` | {info.meaning} | {info.floor} | {info.knob} |\n" for a, info in ACCOUNTS.items()]
    return HEAD + "".join(rows) + TAIL


def main() -> None:
    text = reference()
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.read_text() == text else "docs/ledger.md is stale: run tools/ledger_reference.py")
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
