"""What people see: answers side by side or line by line, a conversation on a terminal, and what Ctrl-C ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.cli import main
from gapless.cli.generate import InOrder
from gapless.cli.output import printable
from gapless.cli.panes import Columns, Lines, open_panes, text_width, wrap
from gapless.cli.progress import downloading
from gapless.models.fetch import WaitingProgress
from gapless.outputs import StreamPiece
from tiny_gguf import write_gguf

# --- text in columns


@given(st.text(alphabet="ab \n\t漢é\u0301🙂-", max_size=80), st.integers(2, 30))
def test_wrapped_lines_fit_and_keep_the_text(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(text_width(line.rstrip()) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_words_are_kept_whole_where_they_fit() -> None:
    assert wrap("one two three", 9) == ["one two", "three"]
    assert wrap("incomprehensible", 6) == ["incomp", "rehens", "ible"]
    assert wrap("a\n\nb", 6) == ["a", "", "b"]
    assert wrap("漢字漢字", 5) == ["漢字", "漢字"]


def piece(text: str, index: int = 0, *, last: bool = False) -> StreamPiece:
    return StreamPiece(index, text, (), "stop" if last else None)


def screen(written: str) -> list[str]:
    """What a terminal shows that knows the few sequences which are used."""
    rows: list[str] = [""]
    row = 0
    for token in re.findall(r"\x1b\[\d*[A-Z]|\r|\n|[^\x1b\r\n]+", written):
        if token.endswith("A") and token.startswith("\x1b"):
            row -= int(token[2:-1])
        elif token == "\x1b[K":
            rows[row] = ""
        elif token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif token != "\r":
            rows[row] += token
    assert row >= 0
    return rows


def test_columns_grow_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    panes = Columns(["first?", "a second question"], 10, 20)
    for word in ("one ", "two ", "three ", "four"):
        panes.take(0, piece(word))
        panes.take(1, piece(word.upper()))
    panes.close()
    shown = screen(capsys.readouterr().out)
    assert [row.split(" | ") for row in shown[:2]] == [["first?    ", "a second"], ["          ", "question"]]
    assert [row.split(" | ") for row in shown[3:5]] == [["one two   ", "ONE TWO"], ["three four", "THREE FOUR"]]


def test_columns_show_the_end_of_what_outgrows_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    panes = Columns(["?", "?"], 10, 6)
    panes.take(0, piece("\n".join(map(str, range(100)))))
    panes.close()
    shown = screen(capsys.readouterr().out)
    assert len(shown) <= 7
    assert [row.split(" ")[0] for row in shown[2:6]] == ["96", "97", "98", "99"]


def test_lines_are_marked_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    panes = Lines(["one?", "two?"], 24)
    panes.take(0, piece("a line that is long "))
    panes.take(1, piece("short"))
    panes.take(0, piece("goes on"))
    panes.close()
    assert capsys.readouterr().out.splitlines() == [
        "1> one?", "2> two?", "", "1| a line that is long", "1| goes on", "2| short"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tty", "term", "columns", "kind"),
    [
        (True, "xterm", "120", Columns),
        (True, "xterm", "40", Lines),
        (True, "dumb", "120", Lines),
        (False, "xterm", "120", Lines),
    ],
)
def test_columns_need_a_wide_terminal(
    monkeypatch: pytest.MonkeyPatch, tty: bool, term: str, columns: str, kind: type
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    for name, value in (("TERM", term), ("COLUMNS", columns), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    assert type(open_panes(["?"] * 3)) is kind


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\x07b\x9b1A\tc\r\nd") == "a[2Jb1A\tc\nd"


def test_several_answers_are_written_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    writer = InOrder(2, 2)
    writer.take(1, piece("late", 0, last=True))
    assert capsys.readouterr().out == ""
    writer.take(0, piece("live", 0))
    assert capsys.readouterr().out == "[1.1] live"
    writer.take(0, piece("", 1, last=True))
    writer.take(0, piece("!", 0, last=True))
    assert capsys.readouterr().out == "!\n\n[1.2] \n\n[2.1] late\n\n"
    writer.take(1, piece("end", 1, last=True))
    assert capsys.readouterr().out == "[2.2] end\n\n"


@pytest.mark.parametrize("tty", [True, False])
def test_a_download_is_shown_until_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tty: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty)
    with downloading("model") as progress:
        progress(25_000_000, 100_000_000)
        progress(100_000_000, 100_000_000)
        written = capsys.readouterr()
    assert written.out == ""
    assert "fetching model" in written.err
    assert ("100%" if tty else "fetched model") in written.err
    assert capsys.readouterr().err == "", "nothing is left to say after the last byte"


@pytest.mark.parametrize("tty", [True, False])
def test_who_waits_for_another_download_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tty: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty)
    with downloading("model") as progress:
        assert isinstance(progress, WaitingProgress)
        progress.waiting()
    assert capsys.readouterr() == ("", "waiting for another process that is fetching model\n")


# --- on a real terminal


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *args: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self._main, other = pty.openpty()
        termios.tcsetwinsize(other, (rows, columns))
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gapless", *args],
            stdin=other, stdout=other, stderr=other, start_new_session=True,
            preexec_fn=self._take_terminal,
            env={**inherited, "TERM": "xterm", **environment},
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    @staticmethod
    def _take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        # A shell without job control lets what it starts in the background ignore Ctrl-C, and that is inherited.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def expect(self, text: str, after: int = 0, timeout_s: float = 240) -> int:
        """Wait for a text; returns where it ends in what was seen."""
        deadline = time.monotonic() + timeout_s
        while (at := self.seen.find(text, after)) < 0:
            assert self._read(deadline - time.monotonic()), f"no {text!r} in {self.seen[after:]!r}"
        return at + len(text)

    def say(self, keys: str) -> None:
        """Press keys; not before the program has had time to wait for them, as a Ctrl-C before that would be missed."""
        time.sleep(0.3)
        os.write(self._main, keys.encode())

    def end(self, timeout_s: float = 240) -> int:
        deadline = time.monotonic() + timeout_s
        while self._read(deadline - time.monotonic()):
            pass
        return self._process.wait(timeout=30)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self._main)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._main], [], [], max(timeout_s, 0))[0]:
            return False
        try:
            chunk = os.read(self._main, 65536)
        except OSError:  # the program has ended
            return False
        self.seen += chunk.decode(errors="replace")
        return bool(chunk)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[type[Terminal]]:
    opened: list[Terminal] = []

    class Kept(Terminal):
        def __init__(self, *args: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
            super().__init__(*args, columns=columns, rows=rows, **environment)
            opened.append(self)

    yield Kept
    for one in opened:
        one.close()


@pytest.mark.xdist_group("real-model")
def test_a_conversation(real_model: Path, terminal: type[Terminal]) -> None:
    chat = terminal("chat", str(real_model), "--ignore-eos", "--max-tokens", "3000", "--temperature", "0",
                    "--kv-memory", "256MB")  # fmt: skip
    at = chat.expect("> ")
    chat.say("Count to a thousand.\n")
    at = chat.expect("thousand.", at)
    begun = at + len(chat.seen[at:]) + 20
    while len(chat.seen) < begun:  # the answer is on its way
        assert chat._read(240)
    chat.say("\x03")
    at = chat.expect("\n> ", at)
    chat.say("/help\n")
    at = chat.expect("/reset begins anew", at)
    at = chat.expect("> ", at)
    chat.say("\x03")
    at = chat.expect("Ctrl-D leaves", at)
    at = chat.expect("> ", at)
    chat.say("\x1b[A\x1b[A\x05 Slowly.\n")  # the line before the last, and more at its end
    at = chat.expect("thousand. Slowly.", at)
    chat.say("\x03")
    at = chat.expect("\n> ", at)
    chat.say("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.seen


@pytest.mark.xdist_group("real-model")
def test_ctrl_c_ends_a_command(real_model: Path, terminal: type[Terminal]) -> None:
    command = terminal("generate", str(real_model), "--prompt", "One", "--ignore-eos", "--max-tokens", "4000")
    while len(command.seen) < 40:
        assert command._read(240)
    command.say("\x03")
    assert command.end() == 130
    assert command.seen.rstrip().endswith("interrupted")
    assert "Traceback" not in command.seen


@pytest.fixture(scope="module")
def tiny_default(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache directory whose default model is a tiny random one, with the compiled kernels of the real one."""
    from gapless.models.store import BUILTIN, cache_dir

    root = tmp_path_factory.mktemp("cache")
    model = BUILTIN["smollm2-135m"]
    target = root / "models" / model.name / Path(model.member).name
    target.parent.mkdir(parents=True)
    write_gguf(target, "smollm2", "Q4_0", scratch=tmp_path_factory.mktemp("scratch"))
    os.truncate(target, model.size_bytes)  # else it would be fetched: a file of another size is not the model
    (root / "kernels").symlink_to(cache_dir() / "kernels", target_is_directory=True)
    return str(root)


@pytest.mark.xdist_group("real-model")
@pytest.mark.parametrize(("columns", "painted"), [(120, True), (40, False)])
def test_the_demo_on_a_terminal(terminal: type[Terminal], tiny_default: str, columns: int, painted: bool) -> None:
    demo = terminal("demo", "--kv-memory", "32MB", columns=columns, rows=30, GAPLESS_CACHE=tiny_default, NO_COLOR="1")
    assert demo.end() == 0, demo.seen
    assert ("\x1b[" in demo.seen) == painted
    assert "\x1b[3" not in demo.seen, "colours"
    assert ("1| " in demo.seen) != painted
    for text in ("tokens/s", "Limit: a step of three tokens", "Try next", "gapless chat"):
        assert text in demo.seen


@pytest.mark.xdist_group("real-model")
def test_the_demo_in_a_pipe(tiny_default: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gapless", "demo", "--json", "--kv-memory", "32MB"],
        env={**os.environ, "GAPLESS_CACHE": tiny_default}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert len(found["answers"]) == 3
    assert found["floor_tpot_s"] > 0
    assert found["floor_share"] == pytest.approx(found["floor_tpot_s"] / found["tpot_s"])
    assert found["tokens_per_s"] > 0


# --- what the options make of the demo


@pytest.mark.xdist_group("real-model")
@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ((), ("all at once", "a step of three tokens")),
        (("--max-running", "2"), ("two at once", "a step of two tokens")),
        (("--max-running", "1"), ("one after the other", "a step of one token ")),
        (("--float-weights",), ("all at once", "float32 weights")),
        (("--executor", "reference"), ("NumPy reference",)),
    ],
)
@pytest.mark.parametrize("columns", ["1", "20", "120"])
def test_the_demo_says_what_was_run(
    tiny_default: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    texts: tuple[str, ...],
    columns: str,
) -> None:
    monkeypatch.setenv("GAPLESS_CACHE", tiny_default)
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["demo", "--kv-memory", "32MB", "--threads", "2", *options]) == 0
    shown = capsys.readouterr().out
    for text in (*texts, "…\n"):  # a random model goes on until it is cut
        assert text in shown


def test_an_answer_that_was_cut_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    for make in (lambda: Lines(["?", "?"], 40), lambda: Columns(["?", "?"], 20, 10)):
        panes = make()
        panes.take(0, piece("cut"))
        panes.take(0, StreamPiece(0, "", (), "length"))
        panes.take(1, piece("whole", last=True))
        panes.close()
        shown = capsys.readouterr().out
        assert "cut…" in shown
        assert "whole…" not in shown
