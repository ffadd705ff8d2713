"""Programs in terminals: one of the kernel's own, whose bytes are seen, and tmux, which shows what a person sees."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


class Terminal:
    """A program that has a terminal of its own, and all that it has written there."""

    def __init__(self, command: Sequence[str], columns: int, rows: int, env: Mapping[str, str]) -> None:
        self._ours, theirs = os.openpty()
        self.resize(columns, rows)
        self.written = b""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", **env},
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self._ours >= 0:
            self.close()

    @property
    def text(self) -> str:
        """Without what moves and colours."""
        return CONTROL.sub(b"", self.written).decode(errors="replace")

    def resize(self, columns: int, rows: int) -> None:
        """The kernel tells the program by SIGWINCH."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """As a window is closed: the kernel tells the program by SIGHUP, and nobody reads what it writes."""
        os.close(self._ours)
        self._ours = -1

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def expect(self, words: str, seconds: float = 60.0) -> None:
        """Read until these words were written after what was read before; fail with all that was."""
        self._read_until(words, len(self.text), seconds)

    def shows(self, words: str, seconds: float = 60.0) -> None:
        """Read until these words are among all that was written: a picture may come in pieces."""
        self._read_until(words, 0, seconds)

    def wait(self, seconds: float = 60.0) -> int:
        """Read until the program has ended; give its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(max(0.0, deadline - time.monotonic()))

    def _read_until(self, words: str, start: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text[start:]:
            assert self._read(deadline), f"{words!r} did not come: {self.text}"

    def _read(self, deadline: float) -> bool:
        if not select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            piece = os.read(self._ours, 1 << 16)
        except OSError:  # the last that had it open has closed it
            return False
        self.written += piece
        return bool(piece)


class Tmux:
    """A program in a window of tmux."""

    def __init__(self, command: Sequence[str], columns: int, rows: int, folder: Path) -> None:
        self._socket = str(folder / "tmux")
        size = ["-x", str(columns), "-y", str(rows)]
        self._do("-f", "/dev/null", "new-session", "-d", *size, *command)
        self._do("set-option", "-g", "window-size", "manual")
        self.resize(columns, rows)

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *_: object) -> None:
        self._do("kill-server")

    def screen(self) -> str:
        return self._do("capture-pane", "-p")

    def resize(self, columns: int, rows: int) -> None:
        self._do("resize-window", "-x", str(columns), "-y", str(rows))

    def expect(self, fits: Callable[[str], bool], seconds: float = 30.0) -> str:
        """Look until the screen fits, and give it."""
        deadline = time.monotonic() + seconds
        while not fits(screen := self.screen()):
            assert time.monotonic() < deadline, screen
            time.sleep(0.05)
        return screen

    def _do(self, *words: str) -> str:
        # With the environment that we were given: readline, which pytest imports, adds the size of our own terminal.
        env = {**os.environ, "TERM": "xterm-256color"}
        words_of_tmux = ["tmux", "-S", self._socket, *words]
        return subprocess.run(words_of_tmux, capture_output=True, text=True, check=True, env=env).stdout
