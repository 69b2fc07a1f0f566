"""The cache of compiled kernels: what is run is what was compiled, whatever has become of the files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import ExecutorError, GaplessError, ResourceError
from gapless.kernels.cpu import build, loader
from gapless.kernels.cpu.isa import detect

CODE, SYMBOLS = b"\x7fELF and more", {"add": "_ZN3add", "mul": "_ZN3mul"}


def write(path: Path) -> None:
    build.write_whole(path, CODE)
    build.write_whole(path.with_suffix(".json"), build.manifest(CODE, SYMBOLS))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "x.o")
    assert build.read_whole(tmp_path / "x.o") == (CODE, SYMBOLS)


@given(st.data())
def test_a_changed_byte_anywhere_is_seen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("kernels")
    write(folder / "x.o")
    path = folder / data.draw(st.sampled_from(["x.o", "x.json"]))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(
        data.draw(
            st.sampled_from(
                [
                    content[:place],
                    content[:place]
                    + bytes([content[place] ^ 1 << data.draw(st.integers(0, 7))])
                    + content[place + 1 :],
                    content[:place] + b"\0" * (len(content) - place),
                    content + b"x",
                ]
            )
        )
    )
    found = build.read_whole(folder / "x.o")
    # White space of the JSON text may change; what it says may not.
    assert found is None or found == (CODE, SYMBOLS)
    assert found is None or path.suffix == ".json"


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"sha256": 3, "symbols": {}}', "[" * 10_000, '{"symbols": 1}']
)
def test_lists_of_symbols_that_are_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "x.o")
    (tmp_path / "x.json").write_text(text)
    assert build.read_whole(tmp_path / "x.o") is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "_loaded", {})
    return loader.cache_folder(detect())


def load() -> list[str]:
    """Load a small module as a new process would; returns what is said of it."""
    loader._loaded.clear()
    said: list[str] = []
    loader.load_kernels(detect(), said.append, ("probe",))
    return said


def test_damaged_files_are_compiled_again(cache: Path) -> None:
    (cache / "build-left").mkdir(parents=True)
    assert load()
    assert not load(), "it is in the cache"
    assert not list(cache.glob("build-*")), "nor is anything left of a build that was killed"
    (code,) = cache.glob("*.o")
    code.write_bytes(code.read_bytes()[:1000])
    code.with_suffix(".json").write_text(json.dumps({"sha256": "0", "symbols": {}}))
    assert load()
    assert not load()


def test_a_cache_that_cannot_be_written_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(loader.tempfile, "tempdir", None)
    said = load()
    assert "cannot be written" in said[0]
    assert "GAPLESS_CACHE" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["cache"], "what was for now is gone"


def test_a_build_ends_with_who_waits_for_it(tmp_path: Path) -> None:
    """Whatever ends that: a signal that nothing can be done about included."""
    starting = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(60)"
    building = (
        "import time; from gapless.kernels.cpu import build; build.die_with_parent(); print('on', flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starting, sys.executable, "-c", building], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        build_pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "on\n"
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{build_pid}").exists() and "Z" not in Path(f"/proc/{build_pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the build goes on"
        time.sleep(0.01)


class Ended:
    """A build process that has ended."""

    def __init__(self, code: int, said: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.process.wait()


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (build.NOT_WRITTEN, ResourceError, "No space left on device; make room in .*GAPLESS_CACHE"),
        (1, ExecutorError, "compiling the kernels of probe failed: x.o: No space"), (-9, ExecutorError, "failed"),
    ],
)  # fmt: skip
def test_why_a_build_failed(tmp_path: Path, code: int, error: type[GaplessError], words: str) -> None:
    ended = Ended(code, f"x.o: {os.strerror(errno.ENOSPC)}")
    with pytest.raises(error, match=words):
        loader._check_built("probe", ended.process, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_the_disks_matter(tmp_path: Path) -> None:
    (tmp_path / "probe.o").symlink_to("/dev/full")
    done = subprocess.run(
        [sys.executable, "-m", "gapless.kernels.cpu.build", "probe", str(tmp_path / "probe.o")],
        env=build.target_environment(detect()), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == build.NOT_WRITTEN
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert "Traceback" not in done.stderr
