"""Write docs/ledger.md with the accounts as the program has them. ``--check`` compares only."""

from __future__ import annotations

from gapless.ledger.accounts import ABOVE_FLOORS, ACCOUNTS, Account
from page import write_page

HEAD = """# The ledger

Every interval between two tokens of a request is booked wholly to accounts, in nanoseconds that add up: from when its
reader had the token before (for the first one: from the request's arrival) to when its reader has it. `gapless bench`
prints the books of its runs and [records them](#recorded-ledgers) for `gapless ledger`; `gapless generate` prints those
of its answers on a terminal, and `/ledger` in `gapless chat` those of the conversation so far.
[Where did my token's time go?](where-did-my-tokens-time-go.md) walks through one real run.

Made by `tools/ledger_reference.py` from the table in `gapless.ledger.accounts`.

## Accounts

| account | what is booked to it | floor | when it is large | of a [waiting budget](#the-waiting-budget) |
|---|---|---|---|---|
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

Between ranks the same rule divides a collective (there are none in this version: the accounts `link` and `network`
stay empty). Each rank stamps its arrival, with clocks that are aligned beforehand; until the last one has come the
others wait for it, which is `sync`, and only from there on bytes move:

```text
rank 0   work |~~~~~~ sync ~~~~~~|== link ==|
rank 1   work ......... work ....|== link ==|
                                 ^ the last arrival
```

## What a token cost

What a request *waited for* is one question; what it *cost* is another. A step is booked once and divided over the
requests that it computed for, and the parts add up to it exactly: nanoseconds, bytes and FLOPs.

- An operation is divided equally over the tokens that it computed: weights that were read once are shared by all of
  them, and so are `sync` and `launch`.
- Attention is divided by the positions that each token looks back on.
- Scores and sampling are divided over the tokens that were sampled.
- Joules are divided as the time on the device is: what a meter has counted since the steps before, over their time.
  Energy used while nothing ran is nobody's. Meters are NVML, AMD SMI and RAPL, through
  [zeus](https://ml.energy/zeus/) (`pip install 'gapless[energy]'`); they measure whole packages and GPUs, whoever uses
  them. Where there is none joules are null, and `gapless bench` says why.
- What steps computed behind the last token that was delivered (of a request that was aborted, or one step too many) is
  `undelivered`.

## What a program gets

`gapless bench --json` has under `ledger` the number of `tokens` and `steps` booked, `wall_seconds`, `device_seconds`,
`joules`, and under `accounts` for each account:

- `seconds`, `floor_seconds`: sums over tokens; the seconds add up to `wall_seconds`.
- `ttft_seconds`, `tpot_seconds`, `tpot_floor_seconds`: means of first tokens, and of the tokens behind them.
- `device_seconds`, `bytes`, `flops`, `joules`: of the steps, once each, however many tokens shared them.
- `source`: "measured", "modelled" or "replayed".

`hidden_seconds` is what the host did while the device ran. `token_times` tells how even tokens came:

- percentiles, each the least time that so many percent of the times between tokens do not exceed;
- `jitter_seconds`, the mean difference, without its sign, of a time and the one before it in the same request: 0 where
  tokens come at a steady pace, however slow. `jitter_accounts` is the same by account, in the direction in which the
  whole moved, so that they add up;
- `tail_over_seconds`, by how much the slowest hundredth (`tail_count`) is longer than the mean, and `tail_accounts`.

They are of the last 65,536 tokens or so; sums are of all. `worst` are the ten tokens behind the first of their request
that were waited for longest, one of each step, with the account that holds most of the time, `beside_tokens` (prompt
tokens of others in its steps) and `others_of_step`. `undelivered` and `triangle` are explained beside this.

## The waiting budget

`--waiting-budget 20ms` (of `bench`, `generate` and `ledger show`) shares the time per token that a service promises
(TPOT, behind the first token) over the accounts and holds it against what was spent. Every account gets its floor. What
is left above the floors may be waited: accounts get the percentages of the table; those with a floor share theirs in
proportion to it. `--waiting-budget 20ms,neighbours=8ms` sets what an account may take, its floor included; the rest is
shared as before. A budget below the floors is refused: no tuning reaches it.

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

`show` prints the books as `bench` does. With `--json` there are the facts of the run and `ledger` as `bench` has it
(`worst` with the `run` beside, where there are several).

`diff` compares, account by account, the mean over runs of what a token of the run took. A change is *significant*
where Welch's 95% interval for the difference of two means, from the runs' means, does not hold 0. With fewer than two
runs in a file no change can be told; small ones need five or more. The intervals are one by one: of twenty accounts
that are the same, one is called changed on average. The runs of a file follow each other, so what changes on a machine
from hour to hour is not in their spread. Files may be of different models or loads; in what they
differ, settings of the engine included, is noted. Below stand the times that users feel, each of a run: the mean
time to the first token, the mean of later ones, their 99th percentile and the longest.

### The file

One JSON value a line, in UTF-8; gzip where the name ends in `.gz`. It is written whole, or not at all.

- The first line: `format` "gapless-ledger", `version` 2, `model`, `batch`, `prompt_tokens`, `output_tokens`, `runs`,
  `threads`, `isa`, `ceilings` (that floors are taken from), `gapless` (its version), `source`, `meters` (of joules),
  `started_unix_ns` (when the times in the file begin), `settings` (of the engine), `accounts`, and under `token`,
  `step` and `host` the names of the columns of those rows.
- `["token", ...]`: `run` from 0, `request`, `token` in its request from 0, `step` that gave it, `begin_ns` and `end_ns`
  from the first time in the file, `beside_tokens`, `spent_ns` and `floor_ns` by account, `share` of the steps (time by
  account, `flops`, `weight_bytes`, `kv_bytes`), `joules` or null. Zeros are left out.
- `["step", ...]`: `run`, `step`, `begun_ns` and `ended_ns` on the device, `waited_ns` of each thread for the others.
- `["host", ...]`: `run`, `begin_ns` and `account`: what the host did from then on.
- The last line: the numbers of `tokens` and `steps`, `wall_ns`, `device_ns`, by account `spent_ns`, `floor_ns`,
  `hidden_ns` and `joules` (or null), and `share` and `undelivered` of all steps.

The accounts of a token add up to `end_ns - begin_ns`, and the totals to the sums of the rows; a reader that finds
otherwise, or no last line, says so. A change that older readers would misread raises the version.

### Exports

- `jsonl`: an object a line for each token, with the names of the table above.
- `chrome`: [trace events](https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsNchNAySU) for
  Perfetto or `chrome://tracing`: a track for each request, with its tokens and in them their accounts; one for the
  steps on the device, and one for each of its threads, how long it worked and then waited; and one for the thread that
  drives the engine. Within a token the accounts are laid end to end in the order of the first table above, and so are
  work and waiting in a step: the file has how long each took, not when. Times are multiples of 1/4096 microsecond,
  which viewers add up without rounding: they drop events that overlap by the last digit.

  ![Tokens of four requests with their accounts, two threads of the device, and the host](images/trace.png)

  Perfetto with a trace of four requests: the tokens of a step end together, thread 1 waits for thread 0 in step 26
  (`sync`), and between two steps the host plans and describes the next one.

- `parquet` (needs `pip install gapless[export]`): a row for each token: `run`, `request`, `token`, `step`, `begin_ns`,
  `end_ns`, `beside_tokens`, for each account `<account>_ns` (all int64) and `<account>_floor_ns` (double), for each
  column of `share` `share_<column>` (int64), and `joules` (double, or null). The facts of the run are JSON under the
  key `gapless-ledger` of the schema's metadata. DuckDB, for one, queries the file as it lies there. Which requests had
  the slowest tokens, and what part of their time others took:

  ```sql
  SELECT run, request,
         sum(end_ns - begin_ns) FILTER (token = 0) / 1e6 AS ttft_ms,
         quantile_disc(end_ns - begin_ns, 0.99) FILTER (token > 0) / 1e6 AS p99_ms,
         sum(queue_ns + preempted_ns + neighbours_ns) / sum(end_ns - begin_ns) AS for_others,
         sum(share_weight_bytes) / count(*) AS weight_bytes_a_token
  FROM 'before.parquet'
  GROUP BY run, request
  ORDER BY p99_ms DESC
  LIMIT 10
  ```

- `prometheus` (needs `pip install gapless[export]`): metrics in the text format that Prometheus scrapes. Counters by
  `account`: `gapless_ledger_seconds_total`, `gapless_ledger_floor_seconds_total`, `gapless_ledger_hidden_seconds_total`
  (of the totals), `gapless_ledger_device_seconds_total` and `gapless_ledger_joules_total` (of the steps, once each;
  joules are left out where they are not known). Counters `gapless_ledger_tokens_total`, `gapless_ledger_steps_total`,
  `gapless_ledger_flops_total` and, by `kind` (`weights`, `kv`), `gapless_ledger_bytes_total`. The histogram
  `gapless_ledger_token_seconds` has the times between two tokens of a request.
- `otlp`: OpenTelemetry spans. Each run is a trace: a span `gapless run`, and below it a span `gapless request` for each
  request, from its arrival to when its reader had its last token, with an event `first token`. Of the request's tokens
  (and of all tokens, at the run) there are `gapless.tokens`, `gapless.ttft.seconds`, `gapless.tpot.seconds`,
  `gapless.account.<account>.seconds` and `.floor_seconds`; of what steps cost `gapless.share.device.seconds`,
  `gapless.share.<account>.seconds`, `gapless.share.flops`, `.weight_bytes`, `.kv_bytes`, and `gapless.joules` where
  they are known. Accounts with nothing are left out. The resource has `service.name` "gapless", `service.version`,
  `gapless.model`, `.threads`, `.isa` and `.source`. Ids are made of `started_unix_ns`, `run` and `request`: an export
  that is repeated gives the same spans.

  A path gets JSON lines as the collector's `otlpjsonfile` receiver reads them. An address such as
  `http://localhost:4318` is posted to, at `/v1/traces` below it (needs `pip install gapless[export]`), in messages of
  200 spans that may take 10 seconds each. User and password in the address become a header; neither they nor a query
  are ever printed. Proxies are those of `http_proxy` and `https_proxy`; a redirection is an error.
"""


def reference() -> str:
    return HEAD + "".join(map(row, ACCOUNTS)) + TAIL


def row(account: Account) -> str:
    info = ACCOUNTS[account]
    allowance = f"{ABOVE_FLOORS}% with others that have a floor" if info.allowance is None else f"{info.allowance}%"
    return f"| `{account.label}` | {info.meaning} | {info.floor} | {info.knob} | {allowance} |\n"


if __name__ == "__main__":
    write_page("ledger.md", reference(), "ledger_reference.py")
