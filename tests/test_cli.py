"""The commands, as processes: what goes to standard output, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")

QUICK = ("--threads", "2", "--kv-memory", "32MB")


def gapless(*args: str, text: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gapless", *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
        check=False,
    )


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf", "smollm2", "Q4_0"))


def test_generate_one_prompt(real_model: Path) -> None:
    done = gapless("generate", str(real_model), "--prompt", "The capital of France is", "--max-tokens", "8",
                   "--temperature", "0", "--json", *QUICK)  # fmt: skip
    found = as_json(done)
    assert found["text"].startswith(" Paris")
    assert len(found["token_ids"]) == found["completion_tokens"] == 8
    assert (found["prompt_tokens"], found["finish_reason"]) == (5, "length")


def test_generate_several_prompts_and_samples(tiny: str) -> None:
    found = as_json(gapless("generate", tiny, "--prompt", "a", "--prompt", "bc", "--max-tokens", "3", "--json", *QUICK))
    assert [f["prompt_tokens"] for f in found] == [1, 2]
    found = as_json(gapless("generate", tiny, "--prompt", "a", "--n", "3", "--max-tokens", "3", "--json", *QUICK))
    assert [f["index"] for f in found] == [0, 1, 2]


def test_generate_writes_text(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("hello")
    one = gapless("generate", tiny, "--prompt-file", str(tmp_path / "prompt"), "--max-tokens", "4", *QUICK)
    assert one.returncode == 0
    assert one.stdout.endswith("\n")
    piped = gapless("generate", tiny, "--prompt-file", "-", "--max-tokens", "4", "--json", *QUICK, text="hey")
    assert as_json(piped)["prompt_tokens"] == 2  # "he" is one token


def test_bench(tiny: str) -> None:
    size = ("--batch", "3", "--prompt-tokens", "20", "--output-tokens", "6", "--runs", "2")
    found = as_json(gapless("bench", tiny, *size, "--json", *QUICK))
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s", "tpot_s", "weights_bytes", "kv_bytes",
                "floor_tpot_s", "host_share", "peak_rss_bytes"):  # fmt: skip
        assert found[key] > 0, key
    assert found["host_share"] < 1
    text = gapless("bench", tiny, "--runs", "1", "--prompt-tokens", "8", "--output-tokens", "4", *QUICK)
    assert "tokens/s" in text.stdout


def test_doctor(tiny: str) -> None:
    found = as_json(gapless("doctor", tiny, "--json"))
    assert found["memory_bandwidth_bytes_per_s"] > 1e8
    assert found["int8_ops_per_s"] > 1e9
    assert found["floor"]["floor_tpot_s"] > 0
    assert found["isa"] in found["isa_choices"]
    assert "floor" in gapless("doctor", tiny).stdout


def test_chat(tiny: str) -> None:
    done = gapless("chat", tiny, "--json", "--max-tokens", "3", *QUICK, text="hi\n/reset\nagain\n/exit\nnot read\n")
    assert done.returncode == 0
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 2


def test_demo(real_model: Path) -> None:
    assert real_model.exists()
    done = gapless("demo", *QUICK)
    assert done.returncode == 0
    assert "tokens/s" in done.stdout
    assert "Try next" in done.stdout
    assert len(as_json(gapless("demo", "--json", *QUICK))["answers"]) == 3


def test_models_and_pull(real_model: Path) -> None:
    found = {m["name"]: m for m in as_json(gapless("models", "--json"))}
    assert found["smollm2-135m"]["path"] == str(real_model)
    assert as_json(gapless("pull", "smollm2-135m", "--json"))["path"] == str(real_model)
    assert "smollm2-135m" in gapless("models").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "nowhere.gguf", "--prompt", "x"), "'nowhere.gguf'"),
        (("generate", "TINY"), "no prompt was given"),
        (("generate", "TINY", "--prompt", "x", "--temperature", "-1"), "temperature = -1.0"),
        (("generate", "TINY", "--prompt", "x", "--max-tokens", "0"), "max_tokens = 0"),
        (("generate", "TINY", "--prompt", "x" * 300), "300 tokens"),
        (("generate", "TINY", "--prompt", "x", "--isa", "mmx"), "'mmx'"),
        (("generate", "TINY", "--prompt", "x", "--kv-memory", "much"), "'much'"),
        (("generate", "TINY", "--prompt", "x", "--logit-bias", "a=b"), "'a=b'"),
        (("generate", "TINY", "--prompt-file", "/nowhere"), "'/nowhere'"),
        (("bench", "TINY", "--prompt-tokens", "10000"), "10000"),
        (("bench", "TINY", "--batch", "0"), "--batch"),
        (("pull", "hf:only-one-part"), "hf:only-one-part"),
        (("chat", "TINY", "--top-p", "0"), "top_p = 0"),
        (("fly",), "fly"),
    ],
)
@pytest.mark.parametrize("machine", [False, True])
def test_wrong_input_is_one_line(tiny: str, args: tuple[str, ...], message: str, machine: bool) -> None:
    args = tuple(tiny if a == "TINY" else a for a in args)
    done = gapless(*args, *(("--json",) if machine else ()))
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in done.stderr
    if machine:
        assert message.strip("'") in json.loads(done.stdout)["error"]["problem"]
    else:
        assert done.stdout == ""


def test_a_first_run_says_what_it_compiles(tiny: str, tmp_path: Path) -> None:
    done = gapless("generate", tiny, "--prompt", "x", "--max-tokens", "2", "--isa", "portable", "--json", *QUICK,
                   GAPLESS_CACHE=str(tmp_path))  # fmt: skip
    assert as_json(done)["completion_tokens"] == 2
    assert "compiling CPU kernels for portable" in done.stderr
    assert list((tmp_path / "kernels" / "portable").glob("*.o"))


def test_serving_imports_neither_compiler_nor_torch(tiny: str) -> None:
    program = (
        "import sys\nfrom gapless.llm import LLM\nfrom gapless.sampling import SamplingParams\n"
        f"with LLM({tiny!r}, kv_memory_bytes=2**25) as llm:\n"
        "    llm.generate(['x'], SamplingParams(max_tokens=2))\n"
        "print([m for m in ('numba', 'torch', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_planning_imports_no_arrays() -> None:
    program = (
        "import sys, gapless.scheduler, gapless.policy.priority\n"
        "print([m for m in ('numpy', 'numba', 'llvmlite', 'torch') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
