"""The parent's side: processes of engines, asleep while another is measured, and how busy the machine is."""

from __future__ import annotations

import atexit
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.install import HERE, hugging_face_folder, install, python_of, requantised

TICKS = os.sysconf("SC_CLK_TCK")
# Any vocabulary is larger, and the ids below it are the special ones.
FIRST_ID, LAST_ID = 100, 32_000
WARM_TOKENS = 8


CASE_SLACK = 32  # tokens that a request's cache is larger than the request


@dataclass(frozen=True)
class Case:
    """One thing to measure: `batch` fresh random prompts of one length, decoded together."""

    name: str
    batch: int
    prompt: int
    output: int

    def prompts(self, seed: str) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(self.prompt)] for _ in range(self.batch)]


class EngineError(Exception):
    """An engine could not start or could not do a case."""


@dataclass
class Peer:
    """A long-lived process that holds one engine with one format of the weights."""

    name: str
    command: list[str]
    cpus: set[int]
    log: Path
    timeout: float = 600.0
    info: dict[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # A group of its own, so that stopping it while idle stops whatever it has started too.
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True,
            start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, self.cpus),
        )  # fmt: skip
        atexit.register(self.stop)
        self.info = self._read()
        self._signal(signal.SIGSTOP)

    def measure(self, case: Case, seed: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        request = {
            "prompts": case.prompts(seed),
            "output_tokens": case.output,
            # Never the measured prompts: an engine may keep their prefixes.
            "warm_prompts": case.prompts(f"warm-{seed}"),
            "warm_tokens": min(WARM_TOKENS, case.output),
        }
        if self._process.poll() is not None:
            raise EngineError(f"{self.name} has ended (log: {self.log})")
        self._signal(signal.SIGCONT)
        before = group_cpu_s(self._process.pid)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = self._read()
        except BrokenPipeError:
            raise EngineError(f"{self.name} has ended (log: {self.log})") from None
        finally:
            self._signal(signal.SIGSTOP)
        return {**reply, "own_cpu_s": group_cpu_s(self._process.pid) - before}

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        atexit.unregister(self.stop)

    def _signal(self, number: int) -> None:
        assert self._process
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self.timeout)[0]:
            self.stop()
            raise EngineError(f"{self.name}: no answer in {self.timeout:.0f} s; its log is {self.log}")
        line = self._process.stdout.readline()
        if not line:
            tail = " | ".join(self.log.read_text(errors="replace").splitlines()[-3:])
            raise EngineError(f"{self.name} ended: {tail} (log: {self.log})")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{self.name}: {reply['error']}")
        return reply


@dataclass
class Gapless:
    """The gapless command, for what it says of the machine."""

    command: list[str]
    cpus: set[int]
    timeout: float = 900.0

    def call(self, arguments: list[str]) -> dict[str, Any]:
        """One command of gapless that prints a JSON object."""
        try:
            done = subprocess.run(
                [*self.command, *arguments], capture_output=True, text=True, timeout=self.timeout,
                preexec_fn=lambda: os.sched_setaffinity(0, self.cpus),
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"gapless {arguments[0]}: {error}") from error
        if done.returncode:
            tail = " | ".join(done.stderr.splitlines()[-3:])
            raise EngineError(f"gapless {arguments[0]} exited with {done.returncode}: {tail}")
        reply: dict[str, Any] = json.loads(done.stdout)
        return reply


def gapless_engine(work: Path, python: str, model: Path, threads: int, cpus: set[int], cases: list[Case]) -> Peer:
    """Ours, as a process like those of the peers."""
    command = [python, str(HERE / "gapless_worker.py"), "--model", str(model), "--threads", str(threads)]
    command += ["--cache-tokens", str(max(case.batch * (case.prompt + case.output + CASE_SLACK) for case in cases))]
    return Peer("gapless", command, cpus, work / "logs" / "gapless.txt")


def llama_cpp_peers(work: Path, model: Path, formats: list[str], threads: int, cpus: set[int]) -> list[Peer]:
    install(work, "llama-cpp")
    script = [str(python_of(work, "llama-cpp")), str(HERE / "llama_cpp_worker.py"), "--threads", str(threads)]
    logs = work / "logs"
    return [
        Peer(f"llama.cpp {name}", [*script, "--model", str(path)], cpus, logs / f"llama.cpp-{name}.txt")
        for name, path in weight_files(work, model, formats)
    ]


def openvino_peers(
    work: Path, model: Path, formats: list[str], threads: int, cpus: set[int], properties: str
) -> list[Peer]:
    install(work, "openvino")
    script = [str(python_of(work, "openvino")), str(HERE / "openvino_worker.py"), "--threads", str(threads)]
    script += ["--properties", properties]
    logs = work / "logs"
    return [
        Peer(f"OpenVINO {name}", [*script, "--model", str(path)], cpus, logs / f"openvino-{name}.txt")
        for name, path in weight_files(work, model, formats)
    ]


def vllm_peers(work: Path, model: Path, dtype: str, threads: int, cpus: set[int]) -> list[Peer]:
    install(work, "vllm")
    script = [str(python_of(work, "vllm")), str(HERE / "vllm_worker.py"), "--threads", str(threads)]
    command = [*script, "--dtype", dtype, "--model", str(hugging_face_folder(work, model))]
    return [Peer(f"vLLM {dtype}", command, cpus, work / "logs" / "vllm.txt")]


def weight_files(work: Path, model: Path, formats: list[str]) -> list[tuple[str, Path]]:
    """The file itself for the format in its name, and llama.cpp's requantisations for the others."""
    return [(name, model if name in model.name else requantised(work, model, name)) for name in formats]


def group_cpu_s(group: int) -> float:
    """CPU time of all living processes of one group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def machine_cpu_s() -> float:
    """CPU time spent on the whole machine: all but idle and waiting for disks."""
    with open("/proc/stat") as stat:
        fields = [int(value) for value in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


def wait_until_quiet(limit_s: float, busy_share: float = 0.1) -> None:
    """Wait, but not for ever, until the rest of the machine leaves its cores alone for a second."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = machine_cpu_s()
        time.sleep(1.0)
        if machine_cpu_s() - before < busy_share * (os.cpu_count() or 1):
            return
    if limit_s > 0:
        print(f"the machine did not get quiet in {limit_s:.0f} s", file=sys.stderr)


def measure(engine: Peer, case: Case, seed: str, quiet_s: float) -> dict[str, Any]:
    """One sample, with the share of the machine that anything else used meanwhile."""
    wait_until_quiet(quiet_s)
    start, busy = time.monotonic(), machine_cpu_s()
    sample = engine.measure(case, seed)
    others = machine_cpu_s() - busy - sample["own_cpu_s"]
    cores = os.cpu_count() or 1
    return {**sample, "others_share": max(0.0, others / (time.monotonic() - start) / cores)}
