"""Documents: their examples run, their links lead somewhere, the command reference is current."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    (page.relative_to(ROOT).as_posix(), number, code)
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
COMMANDS = [
    (page.relative_to(ROOT).as_posix(), command)
    for page in PAGES
    for command in re.findall(r"^\$ \.venv/bin/gapless (.*)$", page.read_text(), re.MULTILINE)
]


@pytest.mark.xdist_group("real-model")
@pytest.mark.parametrize(("page", "number", "code"), EXAMPLES, ids=[f"{p}-{n}" for p, n, _ in EXAMPLES])
def test_examples_run(real_model: Path, page: str, number: int, code: str) -> None:
    assert real_model.exists()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.xdist_group("real-model")
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{p}-{c.split()[0]}" for p, c in COMMANDS])
def test_commands_run(real_model: Path, tmp_path: Path, page: str, command: str) -> None:
    (tmp_path / "model.gguf").symlink_to(real_model)
    done = subprocess.run(
        [sys.executable, "-m", "gapless", *shlex.split(command)],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("tool", ["cli_reference.py", "ledger_reference.py", "time_page.py"])
def test_pages_that_the_program_makes_are_current(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
