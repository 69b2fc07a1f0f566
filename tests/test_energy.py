"""Joules from counters: with the library where it is installed, and with a stand-in for it everywhere."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gapless import energy
from gapless.energy import EnergyMeter, NoMeter, open_meter

RAPL_DIR = "/sys/class/powercap/intel-rapl"
RANGE_UJ = 262_143_328_850  # what an Intel server has


class NoPermission(Exception):
    """zeus.device.cpu.common.ZeusCPUNoPermissionError of the stand-in."""


@dataclass
class Gpu:
    """What a GPU answers; an error stands for a call that raises it."""

    gpu_index: int
    name: str | Exception = "NVIDIA H200"
    supported: bool = True
    energy_mj: float | Exception = 5_000_000

    def get_name(self) -> str:
        return _answer(self.name)

    def supports_get_total_energy_consumption(self) -> bool:
        return self.supported

    def get_total_energy_consumption(self) -> float:
        return _answer(self.energy_mj)


def _answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@dataclass
class Machine:
    """A tree as of /sys/class/powercap/intel-rapl, GPUs, and a clock."""

    rapl: Path
    gpus: list[Gpu] = field(default_factory=list)
    now_s: float = 1000.0

    def set_uj(self, zone: str, energy_uj: int | str, name: str = "", range_uj: int = RANGE_UJ) -> None:
        """``zone``: "0" for a package, "0:1" for what lies in it. Made if it is not there."""
        at = self.rapl
        for i in range(1, len(zone.split(":")) + 1):
            at = at / ":".join(["intel-rapl", *zone.split(":")[:i]])
        if name:
            at.mkdir(parents=True)
            (at / "name").write_text(f"{name}\n")
            (at / "max_energy_range_uj").write_text(f"{range_uj}\n")
        (at / "energy_uj").write_text(f"{energy_uj}\n")


class RaplFile:
    """As in zeus 0.16: made from files, with the property by which its version is told."""

    wraparound_tracker = property()

    def __init__(self, path: Path) -> None:
        self.energy_uj_path = str(path / "energy_uj")
        self.name = (path / "name").read_text().strip()
        self.max_energy_range_uj = float((path / "max_energy_range_uj").read_text())

    def read(self) -> float:
        raise AssertionError("this starts a process")


class RaplCpu:
    def __init__(self, index: int, folder: Path) -> None:
        self.cpu_index, path = index, folder / f"intel-rapl:{index}"
        self.rapl_file = RaplFile(path)
        inner = [RaplFile(zone) for zone in path.glob("intel-rapl*")]
        self.dram = next((zone for zone in inner if zone.name == "dram"), None)


class DaemonCpu(RaplCpu):
    """Asks the daemon: has no files."""

    def __init__(self, index: int, reads: list[tuple[float, float | None]]) -> None:
        self.cpu_index, self.reads = index, reads

    def supports_get_dram_energy_consumption(self) -> bool:
        return self.reads[0][1] is not None

    def get_total_energy_consumption(self) -> Any:
        return types.SimpleNamespace(cpu_mj=self.reads[0][0], dram_mj=self.reads[0][1])


def stand_in(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> types.SimpleNamespace:
    """Modules with what gapless uses of zeus, as zeus 0.16 has it."""
    names = ("zeus", "zeus.device", "zeus.device.cpu", "zeus.device.cpu.common", "zeus.device.cpu.rapl")
    made = {name: types.ModuleType(name) for name in (*names, "zeus.device.gpu")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(made[above], last, module)

    def get_cpus() -> Any:
        folders = sorted(machine.rapl.glob("intel-rapl:*"))
        found = [RaplCpu(int(folder.name.partition(":")[2]), machine.rapl) for folder in folders]
        return types.SimpleNamespace(cpus=found, rapl_dir=str(machine.rapl))

    cpu, gpu, rapl = made["zeus.device.cpu"], made["zeus.device.gpu"], made["zeus.device.cpu.rapl"]
    vars(cpu).update(get_cpus=get_cpus)
    vars(made["zeus.device.cpu.common"]).update(ZeusCPUNoPermissionError=NoPermission)
    vars(rapl).update(rapl_is_available=machine.rapl.exists, RAPLFile=RaplFile, ZeusdRAPLCPU=DaemonCpu)
    vars(gpu).update(nvml_is_available=lambda: bool(machine.gpus), amdsmi_is_available=lambda: False)
    vars(gpu).update(get_gpus=lambda: types.SimpleNamespace(gpus=machine.gpus))
    return types.SimpleNamespace(cpu=cpu, gpu=gpu, rapl=rapl)


def real_library(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """zeus itself, over the files of ``machine`` and an NVML that answers as its GPUs do."""
    pytest.importorskip("zeus.device")
    import pynvml
    from zeus.device import cpu, gpu
    from zeus.device.cpu import rapl

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ZEUSD_SOCK_PATH", raising=False)
    monkeypatch.delenv("ZEUSD_HOST_PORT", raising=False)
    monkeypatch.setattr(rapl, "RAPL_DIR", str(machine.rapl))
    monkeypatch.setattr(rapl, "rapl_is_available", rapl.rapl_is_available.__wrapped__)
    monkeypatch.setattr(cpu, "rapl_is_available", rapl.rapl_is_available)
    monkeypatch.setattr(cpu, "_cpus", None)
    monkeypatch.setattr(gpu, "_gpus", None)
    monkeypatch.setattr(gpu, "nvml_is_available", lambda: bool(machine.gpus))

    def architecture(device: Gpu) -> int:
        return pynvml.NVML_DEVICE_ARCH_VOLTA if device.supported else pynvml.NVML_DEVICE_ARCH_PASCAL

    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(machine.gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: machine.gpus[index],
        "nvmlDeviceGetC2cModeInfoV": lambda device: types.SimpleNamespace(isC2cEnabled=False),
        "nvmlDeviceGetName": Gpu.get_name,
        "nvmlDeviceGetArchitecture": architecture,
        "nvmlDeviceGetTotalEnergyConsumption": Gpu.get_total_energy_consumption,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Without a library."""
    machine = Machine(tmp_path / "intel-rapl")
    monkeypatch.setattr(energy, "monotonic", lambda: machine.now_s)
    return machine


@pytest.fixture(params=["stand-in", "zeus"])
def machine(request: pytest.FixtureRequest, bare: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (stand_in if request.param == "stand-in" else real_library)(monkeypatch, bare)
    return bare


@pytest.fixture
def opened() -> Iterator[Callable[..., EnergyMeter]]:
    """Opens meters, and closes them behind the test."""
    meters: list[EnergyMeter] = []

    def call(**wanted: bool) -> EnergyMeter:
        meter = open_meter(**wanted)
        assert not isinstance(meter, NoMeter), meter.why
        meters.append(meter)
        return meter

    yield call
    for meter in meters:
        meter.close()


Opened = Callable[..., EnergyMeter]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus", None)
    assert open_meter() == NoMeter("no library: pip install 'gapless[energy]'")


def test_a_library_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "zeus"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "zeus").mkdir()
    (tmp_path / "zeus" / "__init__.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    assert open_meter() == NoMeter("the library zeus cannot be imported: No module named 'not_there_at_all'")


def test_a_library_that_is_too_old(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, bare).rapl.RAPLFile = object
    assert open_meter() == NoMeter("the library zeus is older than 0.16: pip install 'gapless[energy]'")


def test_without_devices(machine: Machine) -> None:
    assert open_meter() == NoMeter("no counter of energy: RAPL does not answer; neither NVML nor AMD SMI answers")
    assert open_meter(cpus=False) == NoMeter("no counter of energy: neither NVML nor AMD SMI answers")
    assert open_meter(gpus=False) == NoMeter("no counter of energy: RAPL does not answer")
    assert open_meter(cpus=False, gpus=False) == NoMeter("no counter of energy: none was asked for")


def test_the_machine_at_hand() -> None:
    pytest.importorskip("zeus.device")
    code = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "from gapless.energy import NoMeter, open_meter\n"
        "meter = open_meter()\n"
        "print(meter.why if isinstance(meter, NoMeter) else meter.parts)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists() and not Path(RAPL_DIR).exists():
        assert done.stdout == "no counter of energy: RAPL does not answer; neither NVML nor AMD SMI answers\n"


def test_a_folder_without_packages(machine: Machine) -> None:
    machine.rapl.mkdir()
    assert open_meter(gpus=False) == NoMeter("no counter of energy: RAPL has no packages")


def test_files_for_root_only(bare: Machine, monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    def denied() -> None:
        raise NoPermission("Refer to https://...")

    bare.set_uj("0", 5, "package-0")
    stand_in(monkeypatch, bare).cpu.get_cpus = denied
    meter = open_meter()
    assert isinstance(meter, NoMeter)
    assert "RAPL's files may be read by root only (run as root, or" in meter.why
    bare.gpus = [Gpu(0)]
    assert opened().left_out == (meter.why.removeprefix("no counter of energy: ").partition("; ")[0],)


def test_files_for_root_only_in_the_library(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    real_library(monkeypatch, bare)
    from zeus.device.cpu import rapl

    def denied(path: str, *mode: str) -> Any:  # rights do not bind root, who may run this
        if path.endswith("energy_uj"):
            raise PermissionError(13, "Permission denied", path)
        return open(path, *mode)

    bare.set_uj("0", 5, "package-0")
    monkeypatch.setattr(rapl, "open", denied, raising=False)
    meter = open_meter(gpus=False)
    assert isinstance(meter, NoMeter)
    assert meter.why.startswith("no counter of energy: RAPL's files may be read by root only")


def test_parts_add_up_from_zero(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 7_000_000, "package-0")
    machine.set_uj("0:0", 1_000_000, "core")
    machine.set_uj("0:1", 3_000_000, "dram")
    machine.set_uj("1", 9_000_000, "package-1-die-0")
    machine.set_uj("2", 90_000_000, "psys")
    machine.gpus = [Gpu(0), Gpu(1, "NVIDIA L4", energy_mj=1)]
    meter = opened()
    assert meter.parts == (
        "cpu package 0", "dram of package 0", "cpu package 1 die 0", "gpu 0 NVIDIA H200", "gpu 1 NVIDIA L4",
    )  # fmt: skip
    assert meter.left_out == ()
    assert meter.read_j() == 0
    machine.now_s += 1
    machine.set_uj("0", 17_000_000)
    machine.set_uj("0:0", 6_000_000)
    machine.set_uj("0:1", 4_500_000)
    machine.set_uj("1", 9_250_000)
    machine.set_uj("2", 99_000_000)
    machine.gpus[0].energy_mj = 5_200_000
    machine.gpus[1].energy_mj = 501
    assert meter.read_j() == pytest.approx(10 + 1.5 + 0.25 + 200 + 0.5)
    assert meter.read_j() == pytest.approx(10 + 1.5 + 0.25 + 200 + 0.5)
    assert meter.failed is None


def test_a_meter_begins_where_it_is_opened(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 7_000_000, "package-0")
    first = opened(gpus=False)
    machine.set_uj("0", 8_000_000)
    second = opened(gpus=False)
    assert (first.read_j(), second.read_j()) == (pytest.approx(1), 0)


def test_only_what_is_asked_for(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 7_000_000, "package-0")
    machine.gpus = [Gpu(0)]
    assert opened(gpus=False).parts == ("cpu package 0",)
    assert opened(cpus=False).parts == ("gpu 0 NVIDIA H200",)


def test_a_counter_that_begins_anew(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", RANGE_UJ - 2_000_000, "package-0")
    meter = opened()
    machine.now_s += 60
    machine.set_uj("0", 1_000_000)
    assert meter.read_j() == pytest.approx(3)
    machine.now_s += 60
    machine.set_uj("0", 2_000_000)
    assert meter.read_j() == pytest.approx(4)
    for turn in range(1, 9):  # nearly twice through the whole range
        machine.now_s += 100
        machine.set_uj("0", (2_000_000 + turn * 60_000_000_000) % RANGE_UJ)
        assert meter.read_j() == pytest.approx(4 + turn * 60_000)


def test_readings_too_far_apart(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 5_000_000, "package-0", range_uj=65_532_610_987)
    meter = opened()
    machine.now_s += 60
    machine.set_uj("0", 6_000_000)
    assert meter.read_j() == pytest.approx(1)
    machine.now_s += 70
    machine.set_uj("0", 7_000_000)
    assert meter.read_j() is None
    assert meter.failed == "cpu package 0: read after 70 s, its counter may have begun anew more than once"


def test_a_pause_of_any_length_is_left_out(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 5_000_000, "package-0", range_uj=65_532_610_987)
    meter = opened()
    machine.now_s += 10
    machine.set_uj("0", 7_000_000)
    assert meter.read_j() == pytest.approx(2)
    machine.now_s += 9000
    machine.set_uj("0", 1_000_000)
    assert meter.resume_j() == pytest.approx(2)
    machine.now_s += 10
    machine.set_uj("0", 4_000_000)
    assert meter.read_j() == pytest.approx(5)
    meter.close()
    assert meter.resume_j() is None


def test_a_counter_set_back(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", RANGE_UJ // 2, "package-0")
    machine.gpus = [Gpu(0)]
    by_file, by_call = opened(gpus=False), opened(cpus=False)
    machine.now_s += 1
    machine.set_uj("0", 1_000_000)
    machine.gpus[0].energy_mj = 3
    assert (by_file.read_j(), by_call.read_j()) == (None, None)
    assert by_file.failed == "cpu package 0: its counter was set back"
    assert by_call.failed == "gpu 0 NVIDIA H200: its counter was set back"


def test_counters_that_stand_at_zero(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 0, "package-0")
    machine.gpus = [Gpu(0, energy_mj=0)]
    assert open_meter() == NoMeter(
        "no counter of energy: cpu package 0: its counter stands at 0; gpu 0 NVIDIA H200: its counter stands at 0"
    )
    machine.set_uj("0", 1)
    meter = opened()
    assert meter.parts == ("cpu package 0",)
    assert meter.left_out == ("gpu 0 NVIDIA H200: its counter stands at 0",)


def test_a_counter_that_stands_still(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 7, "package-0")
    meter = opened()
    machine.now_s += 1
    assert meter.read_j() == 0
    machine.now_s += 5
    assert meter.read_j() is None
    assert meter.failed == "cpu package 0: its counter stands still"


def test_gpus_without_a_counter(machine: Machine) -> None:
    machine.gpus = [Gpu(0, "Tesla P100", supported=False)]
    assert open_meter(cpus=False) == NoMeter("no counter of energy: gpu 0 Tesla P100 has no counter of energy")


def test_a_gpu_without_a_counter_beside_another(machine: Machine, opened: Opened) -> None:
    machine.gpus = [Gpu(0, "Tesla P100", supported=False), Gpu(1)]
    meter = opened(cpus=False)
    assert meter.parts == ("gpu 1 NVIDIA H200",)
    assert meter.left_out == ("gpu 0 Tesla P100 has no counter of energy",)


def test_gpus_that_fail_leave_the_others(bare: Machine, monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    bare.gpus = [
        Gpu(0, "Tesla P100", supported=False),
        Gpu(1, RuntimeError("GPU is lost.\nDetails")),
        Gpu(2, "GRID", energy_mj=RuntimeError("Not Supported")),
        Gpu(3),
    ]
    stand_in(monkeypatch, bare)
    meter = opened(cpus=False)
    assert meter.parts == ("gpu 3 NVIDIA H200",)
    assert meter.left_out == (
        "gpu 0 Tesla P100 has no counter of energy", "gpu 1: GPU is lost", "gpu 2 GRID: Not Supported",
    )  # fmt: skip


def test_a_driver_that_fails_leaves_the_packages(
    bare: Machine, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    def broken() -> None:
        raise ValueError("invalid literal for int() with base 10: 'GPU-1'")

    bare.set_uj("0", 5_000_000, "package-0")
    bare.gpus = [Gpu(0)]
    stand_in(monkeypatch, bare).gpu.get_gpus = broken
    assert opened().left_out == ("invalid literal for int() with base 10: 'GPU-1'",)


def test_no_gpu_for_this_process(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, bare).gpu.nvml_is_available = lambda: True
    assert open_meter(cpus=False) == NoMeter("no counter of energy: no GPU is there")


def test_the_daemon(bare: Machine, monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    bare.set_uj("0", "nobody may read this", "package-0")
    bare.set_uj("1", "nobody may read this", "package-1")
    reads: list[tuple[float, float | None]] = [(5000.0, 700.0)]
    library = stand_in(monkeypatch, bare)
    library.cpu.get_cpus = lambda: types.SimpleNamespace(
        cpus=[DaemonCpu(0, reads), DaemonCpu(1, [(9.0, None)])], rapl_dir=str(bare.rapl)
    )
    meter = opened()
    assert meter.parts == ("cpu package 0", "dram of package 0", "cpu package 1")
    reads[0] = (6000.0, 900.0)
    assert meter.read_j() == pytest.approx(1.2)


def test_a_file_that_fails_later(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 5_000_000, "package-0")
    meter = opened()
    machine.set_uj("0", "")
    assert meter.read_j() is None
    assert meter.failed is not None
    assert meter.failed.startswith("cpu package 0: invalid literal")
    machine.set_uj("0", 6_000_000)
    assert meter.read_j() is None


def test_a_gpu_that_fails_later(bare: Machine, monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    bare.set_uj("0", 5_000_000, "package-0")
    bare.gpus = [Gpu(0)]
    stand_in(monkeypatch, bare)
    meter = opened()
    bare.gpus[0].energy_mj = RuntimeError("GPU is lost")
    assert meter.read_j() is None
    bare.gpus[0].energy_mj = 6_000_000
    assert meter.read_j() is None
    assert meter.failed == "gpu 0 NVIDIA H200: GPU is lost"
    meter.close()
    assert meter.failed == "gpu 0 NVIDIA H200: GPU is lost"


def test_close_twice(machine: Machine) -> None:
    machine.set_uj("0", 5_000_000, "package-0")
    machine.gpus = [Gpu(0)]
    files = len(os.listdir("/proc/self/fd"))
    meter = open_meter()
    assert not isinstance(meter, NoMeter)
    meter.close()
    meter.close()
    assert meter.read_j() is None
    assert meter.failed == "closed"
    assert len(os.listdir("/proc/self/fd")) == files


def test_no_process_and_no_thread_is_started(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 5_000_000, "package-0")
    machine.set_uj("0:0", 5_000_000, "dram")
    machine.gpus = [Gpu(0)]
    before = threading.active_count()
    opened().read_j()
    assert multiprocessing.active_children() == []
    assert threading.active_count() == before


def test_another_thread_reads(machine: Machine, opened: Opened) -> None:
    machine.set_uj("0", 5_000_000, "package-0")
    meter, found = opened(), []
    machine.set_uj("0", 6_000_000)
    thread = threading.Thread(target=lambda: found.append(meter.read_j()))
    thread.start()
    thread.join()
    assert found == [pytest.approx(1)]


def test_a_forked_process_knows_nothing(bare: Machine, monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    bare.set_uj("0", 5_000_000, "package-0")
    stand_in(monkeypatch, bare)
    meter = opened()
    process = os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: process + 1)
        assert meter.read_j() is None
        meter.close()
    assert meter.read_j() == 0


def test_warnings_and_logs_of_the_library_stay_inside(
    bare: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loud() -> bool:
        warnings.warn("a machine without much", stacklevel=1)
        logging.getLogger("zeus.device.gpu.amd").warning("`ROCM_PATH` is not set")
        return False

    stand_in(monkeypatch, bare).gpu.nvml_is_available = loud
    assert isinstance(open_meter(), NoMeter)
    assert caplog.records == []
    assert logging.getLogger("zeus").propagate


def test_nothing_is_imported_before_a_meter_is_opened() -> None:
    code = "import sys, gapless.energy; print([m for m in ('zeus', 'pynvml', 'numpy', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
