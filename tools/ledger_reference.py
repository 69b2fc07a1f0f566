"""Write docs/ledger.md with the accounts as the program has them. ``--check`` compares only."""

from __future__ import annotations

from gapless.ledger.accounts import ACCOUNTS
from page import write_page

HEAD = """# The ledger

Every interval between two tokens of a request is booked wholly to accounts, in nanoseconds that add up: from when its
reader had the token before (for the first one: from the request's arrival) to when its reader has it. `gapless bench`
prints the books of its runs and [records them](#recorded-ledgers) for `gapless ledger`; `gapless generate --ledger`
prints those of its answers.

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

## Recorded ledgers

```text
gapless bench MODEL --runs 5 --ledger-file before.jsonl.gz
gapless ledger show before.jsonl.gz
gapless ledger diff before.jsonl.gz after.jsonl.gz
gapless ledger export before.jsonl.gz --format chrome --output trace.json
```

`show` prints the books as `bench` does, then the times between tokens and the ten tokens behind the first of their
request that were waited for longest, each with the account that holds most of its time. A time between tokens is that
from when the reader had one token of a request to when it had the next. A percentile is the least time that so many
percent of them do not exceed. *Jitter* is the mean difference, without its sign, of such a time and the one before it
in the same request: 0 where tokens come at a steady pace, however slow. With `--json` there are the facts of the run,
`ledger` as `bench` has it (`worst` with the `run` beside) and `token_times`.

`diff` compares, account by account, the mean over runs of what a token of the run took. A change is *significant*
where Welch's 95% interval for the difference of two means, from the runs' means, does not hold 0. With fewer than two
runs in a file no change can be told; small ones need five or more. The intervals are one by one: of twenty accounts
that are the same, one is called changed on average. The runs of a file follow each other, so what changes on a machine
from hour to hour is not in their spread. Files may be of different models or loads; in what they differ is noted.

### The file

One JSON value a line, in UTF-8; gzip where the name ends in `.gz`. It is written whole, or not at all.

- The first line: `format` "gapless-ledger", `version` 1, `model`, `batch`, `prompt_tokens`, `output_tokens`, `runs`,
  `threads`, `isa`, `ceilings` (that floors are taken from), `gapless` (its version), `accounts`, and under `token` and
  `step` the names of the columns of those rows.
- `["token", ...]`: `run` from 0, `request`, `token` in its request from 0, `step` that gave it, `begin_ns` and `end_ns`
  from the first time in the file, `spent_ns` and `floor_ns` by account, without zeros.
- `["step", ...]`: `run`, `step`, `begun_ns` and `ended_ns` on the device, `sync_ns` as the account has it.
- The last line: the numbers of `tokens` and `steps`, the totals `wall_ns`, `device_ns`, `weight_bytes`, `kv_bytes` and
  `flops`, and by account `spent_ns`, `floor_ns` and `hidden_ns`.

The accounts of a token add up to `end_ns - begin_ns`, and the totals to the sums of the rows; a reader that finds
otherwise, or no last line, says so. A change that older readers would misread raises the version.

### Exports

- `jsonl`: an object a line for each token, with the names of the table above.
- `chrome`: [trace events](https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsNchNAySU) for
  Perfetto or `chrome://tracing`. Process 1 has a track for each request, with its tokens and in them their accounts,
  process 2 the device's steps. Within a token the accounts are laid end to end in the order of the first table above:
  the file has how long each took, not when.
- `parquet` (needs `pip install gapless[export]`): a row for each token: `run`, `request`, `token`, `step`, `begin_ns`,
  `end_ns`, then for each account `<account>_ns` (all int64) and `<account>_floor_ns` (double). The facts of the run are
  JSON under the key `gapless-ledger` of the schema's metadata.
"""


def reference() -> str:
    rows = [f"| `{a.label}` | {info.meaning} | {info.floor} | {info.knob} |\n" for a, info in ACCOUNTS.items()]
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    write_page("ledger.md", reference(), "ledger_reference.py")
