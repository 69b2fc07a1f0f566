"""Options that several commands share, and what they are read into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from gapless.checks import RANGES
from gapless.cli.output import note
from gapless.cli.streams import valid_text
from gapless.errors import RequestError
from gapless.machine import allowed_cores
from gapless.sampling import SamplingParams
from gapless.units import parse_bytes

if TYPE_CHECKING:
    from gapless.llm import LLM

DEFAULT_MODEL = "smollm2-135m"

Command = Callable[..., Any]


def json_option_of(writes: str) -> Callable[[Command], Command]:
    """``--json``, with what it makes the command write."""
    return click.option("--json", "as_json", is_flag=True, help=writes)


json_option = json_option_of("Write one JSON value to standard output.")
model_argument = click.argument("model", default=DEFAULT_MODEL)
required_model_argument = click.argument("model")


@dataclass(frozen=True)
class EngineOptions:
    """How the model is run; None leaves the choice to gapless."""

    executor: Literal["cpu", "reference"] = "cpu"
    threads: int | None = None
    isa: str | None = None
    kv_dtype: Literal["f16", "f32", "q8"] | None = None
    context: int | None = None
    max_running: int | None = None
    kv_memory: str | None = None
    depth: int | None = None
    max_step_tokens: int | None = None
    policy: str | None = None
    float_weights: bool = False

    def open(self, model: str) -> LLM:
        """Load the model. Raises GaplessError."""
        from gapless.cli.progress import downloading
        from gapless.llm import LLM

        given = {
            "threads": self.threads,
            "isa": self.isa,
            "kv_dtype": self.kv_dtype,
            "context_tokens": self.context,
            "max_running": self.max_running,
            "kv_memory_bytes": None if self.kv_memory is None else parse_bytes(self.kv_memory, "kv-memory"),
            "depth": self.depth,
            "max_step_tokens": self.max_step_tokens,
            "policy": self.policy,
            "float_weights": self.float_weights or None,
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with downloading(model) as bar:
            llm = LLM(model, executor=self.executor, progress=note, download=bar, **chosen)
        if self.context is not None and self.context > llm.spec.context_tokens:
            note(f"--context {self.context} is more than the model has: {llm.spec.context_tokens} tokens are used")
        return llm

    @property
    def compute_threads(self) -> int:
        return self.threads or allowed_cores()


class Threads(click.IntRange):
    """A number of threads that the allowed cores can sensibly carry: threads wait for each other at every operation."""

    def __init__(self) -> None:
        super().__init__(*RANGES["threads"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        threads: int = super().convert(value, param, ctx)
        cores = allowed_cores()
        most = max(16, 4 * cores)
        if threads > most:
            self.fail(f"{threads} threads are too many for the {cores} cores allowed: give at most {most}", param, ctx)
        return threads


_ENGINE = (
    click.option("--threads", type=Threads(), metavar="N", help="Compute threads  [default: the cores allowed]"),
    click.option("--isa", metavar="NAME", help="Instruction set of the kernels  [default: the best of this machine]"),
    click.option("--kv-dtype", type=click.Choice(["f16", "f32", "q8"]), help="Type of cached keys and values."),
    click.option("--context", type=click.IntRange(*RANGES["context_tokens"]), metavar="TOKENS",
                 help="Longest request  [default: the model's]"),
    click.option("--max-running", type=click.IntRange(*RANGES["max_running"]), metavar="N",
                 help="Requests that run at once."),
    click.option("--kv-memory", metavar="SIZE", help="Memory for cached keys and values, like 2GiB."),
    click.option("--depth", type=click.IntRange(*RANGES["depth"]), metavar="N", help="Steps in flight."),
    click.option("--max-step-tokens", type=click.IntRange(*RANGES["max_step_tokens"]), metavar="N",
                 help="Token budget of a step, raised to --max-running where it is less."),
    click.option("--policy", type=click.Choice(["fcfs", "priority"]), help="Who goes first  [default: fcfs]"),
    click.option("--float-weights", is_flag=True, help="Compute in float32 whatever the file has."),
    click.option(
        "--executor", type=click.Choice(["cpu", "reference"]), default="cpu", show_default=True,
        help="What computes: compiled kernels, or plain NumPy to check them by (slow).",
    ),
)  # fmt: skip


def engine_options(command: Command) -> Command:
    """Add the options of ``EngineOptions``; the command receives them as ``engine``."""
    return _gather(command, _ENGINE, EngineOptions, "engine")


class _Bias(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "ID=BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        try:
            token, _, bias = str(value).partition("=")
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id, '=' and a number", param, ctx)


# Ranges are checked by SamplingParams, which says what is wrong and what to give instead.
def _sampling(used: SamplingParams) -> tuple[Any, ...]:
    """The options of ``SamplingParams``; their help tells what ``used`` has where that is worth telling."""
    return (
        click.option("--max-tokens", type=int, metavar="N", help=f"Longest answer  [default: {used.max_tokens}]"),
        click.option("--min-tokens", type=int, metavar="N", help="Shortest answer before it may end."),
        click.option("--temperature", type=float, metavar="T", help=f"0 is greedy  [default: {used.temperature:g}]"),
        click.option("--top-k", type=int, metavar="K", help="Sample among the K most likely tokens; 0 for all."),
        click.option("--top-p", type=float, metavar="P",
                     help=f"Sample among the likeliest tokens of joint probability P  [default: {used.top_p:g}]"),
        click.option("--min-p", type=float, metavar="P",
                     help="Drop tokens below P times the likeliest one's probability."),
        click.option("--repetition-penalty", type=float, metavar="X",
                     help="Divide the scores of tokens already there."),
        click.option("--presence-penalty", type=float, metavar="X",
                     help="Subtract from scores of tokens already written."),
        click.option("--frequency-penalty", type=float, metavar="X",
                     help="Subtract for each time a token was written."),
        click.option("--logit-bias", type=_Bias(), multiple=True, help="Add BIAS to a token's score (repeatable)."),
        click.option("--seed", type=int, metavar="N", help="Same seed, same tokens."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID",
                     help="End after this token (repeatable)."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end."),
    )  # fmt: skip


# Of no use in a conversation, which has one answer at a time and shows its text.
_SAMPLES = (
    click.option("--n", "n", type=int, metavar="N", help="Samples of each prompt."),
    click.option("--logprobs", type=int, metavar="N",
                 help="Report log-probabilities, with the N most likely tokens; needs --json."),
)  # fmt: skip


def sampling_options(*, samples: bool, **defaults: Any) -> Callable[[Command], Command]:
    """Add fields of ``SamplingParams`` with these defaults; the command receives them as ``sampling``.

    Args:
        samples: also those that ask for several samples, and for more than their text.
    """

    def make(**given: Any) -> SamplingParams:
        chosen = defaults | {name: value for name, value in given.items() if value not in (None, ())}
        if "logit_bias" in chosen:
            chosen["logit_bias"] = dict(chosen["logit_bias"])
        chosen["stop"] = tuple(valid_text(text, "--stop") for text in chosen.get("stop", ()))
        return SamplingParams(**chosen)

    options = (*_sampling(SamplingParams(**defaults)), *(_SAMPLES if samples else ()))
    return lambda command: _gather(command, options, make, "sampling")


def _gather(command: Command, options: tuple[Any, ...], make: Callable[..., Any], name: str) -> Command:
    """Decorate with the options and pass what they make as the one argument ``name``."""
    probe: list[click.Parameter] = click.command()(functools.reduce(lambda f, add: add(f), options, _nothing)).params
    fields = [parameter.name for parameter in probe if parameter.name is not None]

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return command(*args, **{name: make(**{field: kwargs.pop(field) for field in fields})}, **kwargs)

    for option in reversed(options):
        inner = option(inner)
    return inner


def _nothing() -> None:
    """What options are tried on."""


MAX_PROMPT_CHARACTERS = 1 << 26  # of a file: far more than any context holds, and no file of a device ends


def read_prompts(prompts: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
    """The prompts of a command line in order: texts, then files ("-" is standard input) without their last newline.

    Raises RequestError: a file cannot be read, is too long or no text, or there is no prompt.
    """
    read = [valid_text(text, f"prompt {number}") for number, text in enumerate(prompts, 1)]
    for name in files:
        try:
            with click.open_file(name, encoding="utf-8") as file:
                text = file.read(MAX_PROMPT_CHARACTERS + 1)
            if len(text) > MAX_PROMPT_CHARACTERS:
                raise RequestError(
                    f"prompt-file = {name!r} has more than {MAX_PROMPT_CHARACTERS} characters, the most that are read",
                    "give a shorter text",
                )
            text = valid_text(text, f"prompt-file = {name!r}")
            read.append(text.removesuffix("\n"))  # which ends the file, not the prompt
        except UnicodeDecodeError:
            raise RequestError(f"prompt-file = {name!r} is not UTF-8 text", "convert it first") from None
        except OSError as problem:
            raise RequestError(
                f"prompt-file = {name!r} cannot be read: {problem.strerror}", "give the path of a text file"
            ) from None
    if not read:
        raise RequestError("no prompt was given", "give --prompt TEXT or --prompt-file PATH")
    return read
