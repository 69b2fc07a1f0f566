"""The accounts that time is booked to: one table, from which reports and the documentation are made."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Account(IntEnum):
    """What a token waited for. The order is that of reports: on the way to a step, in it, behind it."""

    QUEUE = 0
    PREEMPTED = 1
    NEIGHBOURS = 2
    SCHEDULE = 3
    PREPARE = 4
    LAUNCH = 5
    WEIGHTS = 6
    KV = 7
    COMPUTE = 8
    SYNC = 9
    LINK = 10
    NETWORK = 11
    SAMPLE = 12
    THROTTLE = 13
    DETOKENIZE = 14
    DELIVER = 15
    UNACCOUNTED = 16

    @property
    def label(self) -> str:
        """The name in reports and files."""
        return self.name.lower()


class AccountInfo(NamedTuple):
    """
    Attributes:
        meaning: what is booked here.
        floor: formula of the least it can be; "none" where physics asks for nothing.
        knob: what to turn when it is large.
        allowance: percent of a waiting budget that are its, unless it is told otherwise; None: of those that have a
            floor, which share ``ABOVE_FLOORS`` in proportion to it.
    """

    meaning: str
    floor: str
    knob: str
    allowance: int | None


NO_FLOOR = "none"
ABOVE_FLOORS = 35  # percent of a waiting budget
N_ACCOUNTS = len(Account)

ACCOUNTS: dict[Account, AccountInfo] = {
    Account.QUEUE: AccountInfo(
        "from arrival until the step that first computes the prompt is planned, and what ran before it then", NO_FLOOR,
        "raise --max-running or --kv-memory, or add machines: more arrives than is served", 0,
    ),
    Account.PREEMPTED: AccountInfo(
        "thrown out of the cache for others, until computed again as far as before", NO_FLOOR,
        "raise --kv-memory or lower --max-running: answers outgrow the cache", 0,
    ),
    Account.NEIGHBOURS: AccountInfo(
        "steps, and the part of its own steps, that served other requests' prompts", NO_FLOOR,
        "lower --max-step-tokens: smaller pieces of prompts between tokens, so the longest waits are shorter, and more",
        30,
    ),
    Account.SCHEDULE: AccountInfo(
        "the device waited while the host planned a step or took the results of one", NO_FLOOR,
        "raise --depth: the next step is then planned while one runs", 5,
    ),
    Account.PREPARE: AccountInfo(
        "the device waited while the host described a step to it", NO_FLOOR,
        "raise --depth: the next step is then described while one runs", 5,
    ),
    Account.LAUNCH: AccountInfo(
        "the device was idle and the host did nothing of the above: starting operations, and between them", NO_FLOOR,
        "larger batches: what a step costs to start is then shared by more tokens", 5,
    ),
    Account.WEIGHTS: AccountInfo(
        "operations that reading weights bounds", "weight bytes / memory bandwidth",
        "fewer bits a weight, or larger batches: a weight is read once for all tokens of a step", None,
    ),
    Account.KV: AccountInfo(
        "attention and its cache, where reading keys and values bounds it", "KV bytes / memory bandwidth",
        "--kv-dtype q8, or shorter contexts", None,
    ),
    Account.COMPUTE: AccountInfo(
        "operations that arithmetic bounds", "FLOPs / rate of multiply-adds",
        "more cores, or a processor with a faster dot product", None,
    ),
    Account.SYNC: AccountInfo(
        "threads or ranks waited for the slowest of them, the mean over all", NO_FLOOR,
        "leave the cores to this process alone, and --threads at the cores that it may use", 10,
    ),
    Account.LINK: AccountInfo(
        "bytes between the ranks of a domain", "bytes sent / bandwidth of the link",
        "a smaller tensor-parallel degree", None,
    ),
    Account.NETWORK: AccountInfo(
        "bytes between domains", "bytes sent / bandwidth of the network", "keep what talks much inside a domain", None,
    ),
    Account.SAMPLE: AccountInfo(
        "choosing tokens from scores", NO_FLOOR,
        "fewer options: log-probabilities, penalties, top-k over many tokens", 2,
    ),
    Account.THROTTLE: AccountInfo(
        "the device ran below its clock for heat or power", NO_FLOOR, "better cooling, or a higher power cap", 0,
    ),
    Account.DETOKENIZE: AccountInfo(
        "text was made of tokens, one request after the other, before the token could be used", NO_FLOOR,
        "fewer stop strings; more machines for many streams", 3,
    ),
    Account.DELIVER: AccountInfo(
        "the token was ready and its reader had not taken it", NO_FLOOR,
        "read faster: what takes the tokens (a client, a terminal, a disk) holds itself up", 5,
    ),
    Account.UNACCOUNTED: AccountInfo("what no other account explains: the balancing entry", NO_FLOOR, "report it", 0),
}  # fmt: skip
