"""Compare gapless with its CPU peers in one run and print its ratio to the best peer of each row.

Each peer lives in an environment of its own under --work-dir and in a process of its own that sleeps while
another one is measured. Engines take turns (A B C A B C ...), so that a slow minute strikes all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.engines import (
    Case,
    EngineError,
    Gapless,
    Peer,
    gapless_engine,
    llama_cpp_peers,
    measure,
    openvino_peers,
    vllm_peers,
)
from peers.install import install

FORMATS = ("Q4_0", "Q4_1", "Q8_0")
DOCTOR = ["doctor", "--json"]
Samples = dict[str, dict[str, list[dict[str, Any]]]]  # case -> engine -> samples


@dataclass(frozen=True)
class Row:
    """One line of the result: a rate read from the samples of a case."""

    name: str
    case: str
    metric: str


CASES = (
    Case("short", 1, 16, 128),
    Case("long", 1, 512, 128),
    Case("batch8", 8, 32, 128),
    Case("batch32", 32, 32, 128),
)
ROWS = (
    Row("decode b=1", "short", "decode_tokens_per_s"),
    Row("decode b=1 at 512", "long", "decode_tokens_per_s"),
    Row("decode b=8", "batch8", "decode_tokens_per_s"),
    Row("decode b=32", "batch32", "decode_tokens_per_s"),
    Row("prefill 512", "long", "prefill_tokens_per_s"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="what `gapless pull` fetches (%(default)s)")
    parser.add_argument("--model-file", type=Path, help="a GGUF file to use instead")
    parser.add_argument("--work-dir", type=Path, default=Path("~/.cache/gapless-bench"), help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="threads and cores of every engine (all allowed cores)")
    parser.add_argument("--runs", type=int, default=3, help="samples of each engine and case (%(default)s)")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="(%(default)s)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="weights of the peers (%(default)s)")
    parser.add_argument("--peers", default="llama.cpp,openvino", help="which peers (%(default)s)")
    parser.add_argument("--vllm", action="store_true", help="vLLM's CPU build too (3.5 GB, slow to start)")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument("--openvino-properties", default="{}", help="OpenVINO properties as a JSON object")
    parser.add_argument("--skip-ours", action="store_true", help="measure the peers alone")
    parser.add_argument("--python", default=sys.executable, help="a Python that has gapless (%(default)s)")
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="S",
        help="wait up to S s for an idle machine before a sample",
    )
    parser.add_argument("--setup-only", action="store_true", help="install the peers and make their weights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    return parser.parse_args()


def model_file(args: argparse.Namespace, cpus: set[int]) -> Path:
    if args.model_file:
        path = Path(args.model_file).expanduser().resolve()
    else:
        puller = Gapless([args.python, "-m", "gapless"], cpus)
        try:
            path = Path(puller.call(["pull", args.model, "--json"])["path"])
        except (EngineError, KeyError, json.JSONDecodeError) as error:
            raise SystemExit(f"cannot pull {args.model} ({error}); name a GGUF with --model-file") from error
    if not path.is_file():
        raise SystemExit(f"there is no model file {path}")
    return path


def make_peers(args: argparse.Namespace, work: Path, model: Path, cpus: set[int]) -> list[Peer]:
    formats, wanted, threads = args.formats.split(","), args.peers.split(","), len(cpus)
    peers: list[Peer] = []
    if "llama.cpp" in wanted:
        peers += llama_cpp_peers(work, model, formats, threads, cpus)
    if "openvino" in wanted:
        install(work, "llama-cpp")  # it makes the other formats
        peers += openvino_peers(work, model, formats, threads, cpus, args.openvino_properties)
    if args.vllm:
        peers += vllm_peers(work, model, args.vllm_dtype, threads, cpus)
    return peers


def started(peers: list[Peer]) -> list[Peer]:
    """The peers that start; the others are named and left out."""
    alive = []
    for peer in peers:
        try:
            peer.start()
        except EngineError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        alive.append(peer)
    return alive


def sample_all(engines: list[Peer], cases: list[Case], runs: int, quiet_s: float) -> Samples:
    samples: Samples = {case.name: {engine.name: [] for engine in engines} for case in cases}
    seed = time.time_ns()  # fresh prompts in every run, lest an engine remembers them
    for case in cases:
        for run in range(runs):
            for engine in engines:
                try:
                    sample = measure(engine, case, f"{seed}-{case.name}-{run}-{engine.name}", quiet_s)
                except EngineError as error:
                    print(f"{case.name}: {error}", file=sys.stderr)
                    continue
                samples[case.name][engine.name].append(sample)
                progress(case, run, engine.name, sample)
    return samples


def progress(case: Case, run: int, name: str, sample: dict[str, Any]) -> None:
    decode, prefill = sample["decode_tokens_per_s"], sample["prefill_tokens_per_s"]
    others = f"others used {sample['others_share']:.0%} of the machine"
    rates = f"decode {decode:8.1f}  prefill {prefill:8.1f} tok/s"
    print(f"{case.name:8} run {run + 1}  {name:16} {rates}  ({others})", file=sys.stderr, flush=True)


def rates(samples: Samples, row: Row) -> dict[str, list[float]]:
    """What each engine reached in this row, engines without a sample left out."""
    found = {name: [one[row.metric] for one in many] for name, many in samples[row.case].items()}
    return {name: values for name, values in found.items() if values}


def macs(model: Path) -> tuple[int, int]:
    """Multiply-adds of the weights for each token, and of the output head, which runs once per prompt."""
    from gguf import GGUFReader

    tensors = GGUFReader(model).tensors
    sizes = {tensor.name: int(tensor.n_elements) for tensor in tensors if len(tensor.shape) > 1}
    embedding = sizes.pop("token_embd.weight")
    head = sizes.pop("output.weight", embedding)
    return sum(sizes.values()), head


def ceiling(row: Row, case: Case, sample: dict[str, Any], doctor: dict[str, Any], model: Path) -> float:
    """Tokens per second that this machine's measured bandwidth and int8 rate would allow at most."""
    if row.metric == "decode_tokens_per_s":
        return float(case.batch / sample["floor_tpot_s"])
    body, head = macs(model)
    operations = 2 * case.batch * (body * case.prompt + head)
    compute = operations / doctor["int8_ops_per_s"]
    memory = sample["weights_bytes"] / doctor["memory_bandwidth_bytes_per_s"]
    return float(case.batch * case.prompt / max(compute, memory))


def summary(row: Row, samples: Samples, doctor: dict[str, Any] | None, model: Path) -> dict[str, Any]:
    """The best peer of a row, and ours against it by medians and by best runs."""
    found = rates(samples, row)
    ours = found.pop("gapless", None)
    result: dict[str, Any] = {"row": row.name, "gapless": ours and statistics.median(ours)}
    if found:
        best = max(found, key=lambda name: statistics.median(found[name]))
        result |= {"best_peer": best, "best_peer_rate": statistics.median(found[best])}
        result["fastest_single_run"] = max(map(max, found.values()))
    if ours and found:
        result["ratio"] = result["gapless"] / result["best_peer_rate"]
        result["ratio_of_best_runs"] = max(ours) / result["fastest_single_run"]
    if ours and doctor:
        case = next(case for case in CASES if case.name == row.case)
        last = samples[row.case]["gapless"][-1]
        result["ceiling"] = ceiling(row, case, last, doctor, model)
        result["share_of_ceiling"] = result["gapless"] / result["ceiling"]
    return result


def cell(values: list[float] | None) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def table(header: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    padded = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
              for line in [header, rule, *lines]]  # fmt: skip
    return "\n".join(f"| {line} |" for line in padded)


def show(engines: list[str], shown: list[Row], samples: Samples, summaries: list[dict[str, Any]]) -> None:
    found = [rates(samples, row) for row in shown]
    lines = [[name, *(cell(row.get(name)) for row in found)] for name in engines]
    print("\nTokens per second, the whole batch together: median (slowest-fastest)\n")
    print(table(["engine", *(row.name for row in shown)], lines))

    def number(entry: dict[str, Any], key: str, form: str) -> str:
        return "-" if entry.get(key) is None else format(entry[key], form)

    lines = [
        [
            entry["row"], number(entry, "gapless", ".0f"), entry.get("best_peer", "-"),
            number(entry, "best_peer_rate", ".0f"), number(entry, "ratio", ".2f"),
            number(entry, "ratio_of_best_runs", ".2f"), number(entry, "share_of_ceiling", ".0%"),
        ]
        for entry in summaries
    ]  # fmt: skip
    print("\ngapless against the best peer of each row\n")
    print(table(["row", "gapless", "best peer", "its rate", "ratio", "best runs", "of ceiling"], lines))


def main() -> None:
    args = arguments()
    allowed = sorted(os.sched_getaffinity(0))
    cpus = set(allowed[: args.threads or len(allowed)])
    if args.threads and args.threads > len(allowed):
        raise SystemExit(f"--threads {args.threads}, but only {len(allowed)} cores are allowed")
    names = args.cases.split(",")
    cases = [case for case in CASES if case.name in names]
    if unknown := set(names) - {case.name for case in CASES}:
        raise SystemExit(f"unknown cases: {', '.join(sorted(unknown))}")
    work = args.work_dir.expanduser()
    model = model_file(args, cpus)
    peers = make_peers(args, work, model, cpus)
    if args.setup_only:
        return
    ours = gapless_engine(work, args.python, model, len(cpus), cpus, cases)
    doctor = None if args.skip_ours else Gapless([args.python, "-m", "gapless"], cpus).call(DOCTOR)
    engines = started([*([] if args.skip_ours else [ours]), *peers])
    samples = sample_all(engines, cases, args.runs, args.wait_quiet)
    shown = [row for row in ROWS if row.case in samples]
    summaries = [summary(row, samples, doctor, model) for row in shown]
    show([engine.name for engine in engines], shown, samples, summaries)
    if args.json:
        write_json(args.json, model, cpus, peers, doctor, samples, summaries)
    if not args.skip_ours and not all(row.get(ours.name) for row in samples.values()):
        raise SystemExit("gapless failed in at least one case")


def write_json(
    path: Path, model: Path, cpus: set[int], peers: list[Peer], doctor: dict[str, Any] | None,
    samples: Samples, summaries: list[dict[str, Any]],
) -> None:  # fmt: skip
    report = {
        "model": model.name,
        "threads": len(cpus),
        "machine": {"processor": processor(), "system": platform.platform(), "cores": os.cpu_count()},
        "peers": {peer.name: peer.info for peer in peers},
        "doctor": doctor,
        "rows": summaries,
        "samples": samples,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
