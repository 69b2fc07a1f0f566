"""What the command line is given at its edges: huge numbers, text that is none, streams that are closed, Ctrl-C."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from gapless.arch.spec import LayerWeights
from gapless.bench import held_bytes
from gapless.cli import app, main
from gapless.cli.options import MAX_PROMPT_CHARACTERS, EngineOptions, read_prompts
from gapless.doctor import can_write
from gapless.errors import RequestError
from gapless.kernels.cpu.held import packed_infos
from gapless.kernels.cpu.isa import detect
from gapless.llm import LLM
from gapless.models.load import load_model
from gapless.outputs import Completion, RequestOutput
from gapless.sampling import SamplingParams
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")

QUICK = ("--threads", "2", "--kv-memory", "32MB")
BASE = {
    "generate": ("--prompt", "a", "--max-tokens", "2", "--json"),
    "bench": ("--prompt-tokens", "4", "--output-tokens", "2", "--runs", "1", "--json"),
    "doctor": ("--json",),
    "chat": ("--json",),
}
ASCII = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("limits") / "tiny.gguf", "smollm2", "Q4_0"))


def run(
    *args: str | bytes, text: bytes = b"", closed: Sequence[int] = (), **environment: str
) -> subprocess.CompletedProcess[bytes]:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    return subprocess.run(
        [sys.executable, "-m", "gapless", *args],
        input=text, capture_output=True, timeout=240, env={**os.environ, **environment}, check=False,
        preexec_fn=close if closed else None,
    )  # fmt: skip


# --- numbers


def numeric_options() -> Iterator[tuple[str, str]]:
    context = click.Context(app)
    for name in ("generate", "bench", "doctor"):
        command = app.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType):
                yield name, parameter.opts[0]


@pytest.mark.parametrize("value", [str(10**9), str(10**30)])
@pytest.mark.parametrize(("name", "option"), list(numeric_options()))
def test_a_huge_number_is_served_or_refused_in_one_line(
    tiny: str, capsys: pytest.CaptureFixture[str], name: str, option: str, value: str
) -> None:
    quick = () if name == "doctor" else QUICK
    code = main([name, tiny, *quick, *BASE[name], option, value])
    out, err = capsys.readouterr()
    assert code in (0, 2), err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code == 2)
    assert ("error" in json.loads(out)) == (code == 2)
    if code == 2:
        assert option.strip("-").replace("-", "_") in err.replace("-", "_") or "tokens" in err


@pytest.mark.parametrize("options", [("--max-running", "65536"), ("--max-step-tokens", "1048576"), ("--depth", "16")])
def test_the_greatest_values_work(tiny: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    assert main(["generate", tiny, *QUICK, *BASE["generate"], *options]) == 0, capsys.readouterr().err


def test_threads_are_bounded_by_the_cores(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapless.cli.options.allowed_cores", lambda: 8)
    assert main(["doctor", tiny, "--threads", "33"]) == 2
    assert "33 threads are too many for the 8 cores allowed: give at most 32" in capsys.readouterr().err


def test_threads_that_the_system_does_not_start(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert main(["generate", tiny, *QUICK, *BASE["generate"]]) == 2
    out, err = capsys.readouterr()
    assert "the system refuses another thread (gapless-1); lower --threads" in err
    assert json.loads(out)["error"]["kind"] == "ResourceError"
    assert main(["doctor", tiny, "--threads", "2"]) == 2
    assert "the system refuses another thread (gapless-1); lower --threads" in capsys.readouterr().err


def test_a_context_beyond_the_models_is_told(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", tiny, *QUICK, *BASE["generate"], "--context", "1000"]) == 0
    assert "--context 1000 is more than the model has: 256 tokens are used" in capsys.readouterr().err
    assert main(["generate", tiny, *QUICK, *BASE["generate"], "--context", "256"]) == 0
    assert "--context" not in capsys.readouterr().err


# --- text


@pytest.mark.parametrize("environment", ASCII)
def test_output_that_an_encoding_lacks(tiny: str, environment: dict[str, str]) -> None:
    asked = ("generate", tiny, *QUICK, "--max-tokens", "12", "--seed", "1", "--prompt", "é", "--logit-bias", "128=80")
    text, machine = run(*asked, **environment), run(*asked, "--json", **environment)
    assert (text.returncode, machine.returncode) == (0, 0), text.stderr + machine.stderr
    plain = json.loads(run(*asked, "--json").stdout)
    assert json.loads(machine.stdout.decode("ascii")) == plain
    assert not plain["text"].isascii(), "the answer needs no encoding"
    for command in ("models", "--help"):
        assert run(command, **environment).returncode == 0


@pytest.mark.parametrize("environment", [{}, *ASCII[:2]])
@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("generate", "TINY", "--prompt", "fine", "--prompt", b"b\xffd"), "prompt 2"),
        (("generate", "TINY", "--prompt", "a", "--stop", b"\xc3"), "--stop"),
        (("generate", "TINY", "--prompt-file", "-"), "prompt-file = '-'"),
        (("chat", "TINY", "--system", b"\xff"), "--system"),
    ],
)
def test_what_is_not_utf8_is_named(
    tiny: str, args: tuple[str | bytes, ...], what: str, environment: dict[str, str]
) -> None:
    done = run(*(tiny if a == "TINY" else a for a in args), "--json", text=b"\xff\n", **environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.decode().count("error: ") == 1
    problem = json.loads(done.stdout)["error"]["problem"]
    assert what in problem
    assert "UTF-8" in problem


@pytest.mark.parametrize("environment", [{}, *ASCII[:2]])
def test_a_conversation_goes_on_after_what_is_not_utf8(tiny: str, environment: dict[str, str]) -> None:
    text = "é\n".encode() + b"b\xffd\n" + "ü\n".encode()
    done = run("chat", tiny, *QUICK, "--max-tokens", "2", "--json", text=text, **environment)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["text" in answer for answer in answers] == [True, False, True]
    assert answers[1]["error"]["problem"] == "the question is not valid UTF-8"


# --- streams


@pytest.mark.parametrize("closed", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)])
def test_closed_streams_lead_nowhere(tiny: str, closed: tuple[int, ...]) -> None:
    done = run("generate", tiny, *QUICK, *BASE["generate"], "--context", "1000", closed=closed)
    assert done.returncode == 0, done.stderr
    assert (done.stdout == b"") == (1 in closed)
    assert (done.stderr == b"") == (2 in closed)
    if 1 not in closed:
        assert json.loads(done.stdout)["completion_tokens"] == 2, "nothing else may be written there"


def test_a_closed_input_has_no_prompt(tiny: str) -> None:
    assert run("generate", tiny, "--prompt-file", "-", closed=(0,)).returncode == 2


def test_a_reader_that_has_gone(tiny: str) -> None:
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "wb") as pipe:
        command = [sys.executable, "-m", "gapless", "generate", tiny, *QUICK, *BASE["generate"]]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


# --- Ctrl-C


@pytest.mark.parametrize("name", ["generate", "chat", "bench", "demo"])
def test_ctrl_c_is_an_error_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineOptions, "open", stop)
    assert main([name, *(("--prompt", "x") if name == "generate" else ()), "--json"]) == 130
    out, err = capsys.readouterr()
    found = {"kind": "Interrupted", "problem": "interrupted", "remedy": "", "exit_code": 130}
    assert json.loads(out) == {"error": found}
    assert err == "interrupted\n"


def test_ctrl_c_while_a_program_talks_with_a_model(tiny: str) -> None:
    chat = subprocess.Popen(
        [sys.executable, "-m", "gapless", "chat", tiny, *QUICK, "--max-tokens", "2", "--json"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )  # fmt: skip
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write(b"hi\n")
    chat.stdin.flush()
    assert "text" in json.loads(chat.stdout.readline())
    chat.send_signal(signal.SIGINT)
    rest, err = chat.communicate(timeout=60)
    assert chat.returncode == 130, err
    assert json.loads(rest)["error"]["kind"] == "Interrupted"


# --- what is asked of a model, and what is told


class _FakeLLM:
    """Answers whatever it is asked with nothing, and keeps the parameters."""

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []
        self.template = None
        self.model = self.scheduler = self.executor = self
        self.profile = None

    def __enter__(self) -> _FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def validate(self, _: int) -> int:
        return 100

    def chat_prompt(self, _: object) -> list[int]:
        return [1]

    def generate(self, prompts: Sequence[Any], sampling: SamplingParams, **_: object) -> list[RequestOutput]:
        self.asked.append(sampling)
        return [RequestOutput("", [1], [Completion(0, finish_reason="stop")]) for _ in prompts]


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_help_states_the_defaults_that_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    llm = _FakeLLM()
    monkeypatch.setattr(EngineOptions, "open", lambda *_: llm)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main([name, *(("--prompt", "x") if name == "generate" else ()), "--json"]) == 0
    capsys.readouterr()
    assert main([name, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    stated = {
        option: re.search(rf"--{option.replace('_', '-')} [A-Z] [^-]*?\[default: ([\d.]+)\]", text)
        for option in ("max_tokens", "temperature", "top_p")
    }
    for option, found in stated.items():
        assert found is not None, option
        assert float(found[1]) == getattr(llm.asked[0], option)


@pytest.mark.parametrize("option", ["--n", "--logprobs"])
def test_a_conversation_has_one_answer_and_its_text(tiny: str, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["chat", tiny, option, "2"]) == 2
    assert option in capsys.readouterr().err


def test_log_probabilities_need_json(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", tiny, *QUICK, "--prompt", "a", "--logprobs", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: --logprobs needs --json" in err


def test_answers_know_their_prompt(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", tiny, *QUICK, *BASE["generate"], "--prompt", "b", "--n", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(f["prompt_index"], f["index"]) for f in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("machine", [True, False])
def test_a_question_that_fails_is_told_and_forgotten(tiny: str, machine: bool) -> None:
    long, options = "x" * 100, ("--max-tokens", "90", "--ignore-eos", *(("--json",) if machine else ()))
    questions = [long, long, "/reset", "x" * 300, "short"]
    done = run("chat", tiny, *QUICK, *options, text="\n".join(questions).encode())
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert "the conversation has outgrown the context" in errors[0]
    assert errors[0].endswith("/reset begins anew")
    assert "shorten the prompt" in errors[1]
    if machine:
        objects = [json.loads(line) for line in done.stdout.splitlines()]
        assert [("error" in o) for o in objects] == [False, True, True, False]
        assert objects[1]["error"]["remedy"] == "/reset begins anew"
    else:
        assert b"> " not in done.stdout, "nobody is there to be prompted"
        assert done.stdout.decode().count("…\n") == 2, "both answers were cut"


def test_doctor_tells_where_it_may_write(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "gapless.cli.doctor._caches", lambda _: {"kernels": tmp_path / "none" / "k", "models": Path("/proc/x")}
    )
    assert main(["doctor", tiny]) == 0
    text = capsys.readouterr().out
    assert f"kernel dir {tmp_path}/none/k (writable)" in text
    assert "model dir  /proc/x (NOT writable: set GAPLESS_CACHE to a folder of your own)" in text
    assert main(["doctor", tiny, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["caches_writable"] == {"kernels": True, "models": False}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert not can_write(tmp_path / "file" / "below")


def test_doctor_is_asked_for_more_than_the_model_has(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", tiny, "--context", "255"]) == 0
    assert main(["doctor", tiny, "--context", "256"]) == 2
    assert "the model's context is 256; give at most 255" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_notes_that_nobody_reads_cost_no_answer(tiny: str) -> None:
    asked = ("generate", tiny, *QUICK, *BASE["generate"], "--context", "100000")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gapless", *asked], stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert done.returncode == 0
    assert json.loads(done.stdout)["completion_tokens"] == 2
    gone, writing = os.pipe()
    os.close(gone)
    done = subprocess.run(
        [sys.executable, "-m", "gapless", *asked], stdout=subprocess.PIPE, stderr=writing, check=False
    )
    os.close(writing)
    assert (done.returncode, json.loads(done.stdout)["completion_tokens"]) == (0, 2)


def test_ctrl_c_while_the_program_is_imported() -> None:
    interrupting = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from gapless.__main__ import run\n"
        "sys.exit(run())\n"
    )
    done = subprocess.run([sys.executable, "-c", interrupting], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_damaged_scale_is_told_in_one_line(tmp_path: Path) -> None:
    """Not with a library's warnings before it; and it is the file's fault, not a device's."""
    path = write_gguf(tmp_path / "damaged.gguf", "smollm2", "Q4_0")
    down = load_model(path).weights.layers[0].down
    data = bytearray(path.read_bytes())
    begin = data.index(down.data.tobytes())
    data[begin : begin + 2] = b"\xff\x7b"  # the largest that half precision has; of it the minimum is 8 times that
    data[begin + 18 : begin + 20] = b"\x00\x7e"  # not a number
    path.write_bytes(data)
    for options in ((), ("--executor", "reference"), ("--float-weights",)):
        done = run("generate", str(path), "--prompt", "a", "--max-tokens", "2", *options, PYTHONWARNINGS="error")
        assert done.returncode == 2
        assert b"finite" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_slash_begins_a_command(tiny: str) -> None:
    done = run("chat", tiny, *QUICK, "--max-tokens", "2", text=b"/foo bar\n/exit\n")
    assert done.returncode == 0
    assert b"/foo is no command: /reset begins anew" in done.stderr


def test_the_last_newline_of_a_file_is_not_of_the_prompt(tmp_path: Path) -> None:
    for text, prompt in (("a", "a"), ("a\n", "a"), ("a\n\n", "a\n"), ("a\r\n", "a"), (" a ", " a ")):
        (tmp_path / "prompt").write_bytes(text.encode())
        assert read_prompts(("first",), (str(tmp_path / "prompt"),)) == ["first", prompt]


def test_a_prompt_file_without_end_is_refused() -> None:
    for name in ("/dev/zero", "-"):
        with open("/dev/zero", "rb") as endless:
            done = subprocess.run(
                [sys.executable, "-m", "gapless", "generate", "/nowhere", "--prompt-file", name],
                stdin=endless, capture_output=True, timeout=60, check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
            )  # fmt: skip
        assert done.returncode == 2
        expected = f"error: prompt-file = '{name}' has more than {MAX_PROMPT_CHARACTERS} characters"
        assert done.stderr.decode().startswith(expected)
        assert done.stderr.count(b"\n") == 1


def test_a_prompt_file_of_the_greatest_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.cli.options.MAX_PROMPT_CHARACTERS", 5)
    path = tmp_path / "prompt"
    path.write_text("ééééé", encoding="utf-8")
    assert read_prompts((), (str(path),)) == ["ééééé"]
    path.write_text("éééééé", encoding="utf-8")
    with pytest.raises(RequestError, match="has more than 5 characters, the most that are read; give a shorter text"):
        read_prompts((), (str(path),))


def test_priorities_of_prompts(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("--prompt", "a", "--prompt", "b", "--max-tokens", "2", "--json", "--policy", "priority")
    for given, code in (((), 0), ((1,), 0), ((1, 2), 0), ((1, 2, 3), 2), ((10**30,), 2)):
        options = [word for value in given for word in ("--priority", str(value))]
        assert main(["generate", tiny, *QUICK, *prompts, *options]) == code
    assert "priority = " in capsys.readouterr().err


# --- benchmarks


def test_a_benchmark_of_one_token_has_no_decode_rate(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--prompt-tokens", "8", "--output-tokens", "1", "--runs", "1", "--threads", "1", "--kv-memory", "32MB")
    assert main(["bench", tiny, *size, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("tpot_s", "decode_tokens_per_s", "floor_share"):
        assert found[name] is None
    assert main(["bench", tiny, *size]) == 0
    text = capsys.readouterr().out
    for line in ("1 thread,", "median of 1 run\n", "decode   - tokens/s; - a token"):
        assert line in text


@pytest.mark.parametrize("float_weights", [False, True])
@pytest.mark.parametrize(
    ("family", "quant"), [("smollm2", "Q4_0"), ("smollm2", "Q8_0"), ("qwen2", "F16"), ("mixtral", "Q4_1")]
)
def test_floors_are_of_the_weights_that_are_held(tmp_path: Path, family: str, quant: str, float_weights: bool) -> None:
    path = write_gguf(tmp_path / "m.gguf", family, quant)
    with LLM(path, float_weights=float_weights, kv_memory_bytes=1 << 24, threads=1) as llm:
        held = packed_infos(llm.model.weights, detect().lanes, float_weights)
        matrices = [w for w in _all(held) if len(w.shape) > 1]
        elements = sum(math.prod(w.shape) for w in matrices)
        total = sum(w.nbytes for w in matrices)
        # Matrices that are packed as one share the padding that each has to itself here: at most 31 rows each.
        assert held_bytes(llm) <= total <= 1.5 * held_bytes(llm)
        if float_weights:
            assert total >= 4 * elements


def _all(weights: Any) -> list[Any]:
    layers = [getattr(layer, f) for layer in weights.layers for f in LayerWeights.__dataclass_fields__]
    head = [] if weights.lm_head is weights.embed else [weights.lm_head]
    return [w for w in [weights.embed, *layers, *head] if w is not None]


def test_a_benchmark_with_float_weights_reads_more(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for options in ((), ("--float-weights",)):
        assert main(["bench", tiny, *QUICK, *BASE["bench"], *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    packed, floats = found
    assert floats["weights_bytes"] > 5 * packed["weights_bytes"]
    assert floats["step_bytes"] > 5 * packed["step_bytes"]
