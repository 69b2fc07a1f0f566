"""Options that several commands share, and what they are read into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from gapless.cli.output import note
from gapless.errors import RequestError
from gapless.sampling import SamplingParams
from gapless.units import parse_bytes

if TYPE_CHECKING:
    from gapless.llm import LLM

DEFAULT_MODEL = "smollm2-135m"

Command = Callable[..., Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON value to standard output.")
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
            return LLM(model, executor=self.executor, progress=note, download=bar, **chosen)


_POSITIVE = click.IntRange(min=1)

_ENGINE = (
    click.option("--threads", type=_POSITIVE, metavar="N", help="Compute threads  [default: the cores allowed]"),
    click.option("--isa", metavar="NAME", help="Instruction set of the kernels  [default: the best of this machine]"),
    click.option("--kv-dtype", type=click.Choice(["f16", "f32", "q8"]), help="Type of cached keys and values."),
    click.option("--context", type=_POSITIVE, metavar="TOKENS", help="Longest request  [default: the model's]"),
    click.option("--max-running", type=_POSITIVE, metavar="N", help="Requests that run at once."),
    click.option("--kv-memory", metavar="SIZE", help="Memory for cached keys and values, like 2GiB."),
    click.option("--depth", type=_POSITIVE, metavar="N", help="Steps in flight."),
    click.option("--max-step-tokens", type=_POSITIVE, metavar="N", help="Token budget of a step."),
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
_SAMPLING = (
    click.option("--max-tokens", type=int, metavar="N", help="Longest answer  [default: 256]"),
    click.option("--min-tokens", type=int, metavar="N", help="Shortest answer before it may end."),
    click.option("--temperature", type=float, metavar="T", help="0 is greedy  [default: 1]"),
    click.option("--top-k", type=int, metavar="K", help="Sample among the K most likely tokens; 0 for all."),
    click.option("--top-p", type=float, metavar="P", help="Sample among the likeliest tokens of joint probability P."),
    click.option("--min-p", type=float, metavar="P", help="Drop tokens below P times the likeliest one's probability."),
    click.option("--repetition-penalty", type=float, metavar="X", help="Divide the scores of tokens already there."),
    click.option("--presence-penalty", type=float, metavar="X", help="Subtract from scores of tokens already written."),
    click.option("--frequency-penalty", type=float, metavar="X", help="Subtract for each time a token was written."),
    click.option("--logit-bias", type=_Bias(), multiple=True, help="Add BIAS to a token's score (repeatable)."),
    click.option("--seed", type=int, metavar="N", help="Same seed, same tokens."),
    click.option("--logprobs", type=int, metavar="N", help="Report log-probabilities, with the N most likely tokens."),
    click.option("--n", "n", type=int, metavar="N", help="Samples of each prompt."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID",
                 help="End after this token (repeatable)."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end."),
)  # fmt: skip


def sampling_options(**defaults: Any) -> Callable[[Command], Command]:
    """Add the fields of ``SamplingParams`` with these defaults; the command receives them as ``sampling``."""

    def make(**given: Any) -> SamplingParams:
        chosen = defaults | {name: value for name, value in given.items() if value not in (None, ())}
        if "logit_bias" in chosen:
            chosen["logit_bias"] = dict(chosen["logit_bias"])
        return SamplingParams(**chosen)

    return lambda command: _gather(command, _SAMPLING, make, "sampling")


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


def read_prompts(prompts: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
    """The prompts of a command line in order: texts, then files ("-" is standard input)."""
    read = list(prompts)
    for name in files:
        try:
            with click.open_file(name, encoding="utf-8") as file:
                read.append(file.read())
        except UnicodeDecodeError:
            raise RequestError(f"prompt-file = {name!r} is not UTF-8 text", "convert it first") from None
        except OSError as problem:
            raise RequestError(
                f"prompt-file = {name!r} cannot be read: {problem.strerror}", "give the path of a text file"
            ) from None
    if not read:
        raise RequestError("no prompt was given", "give --prompt TEXT or --prompt-file PATH")
    return read
