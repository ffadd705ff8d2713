"""Ctrl-C and its like in a worker: leave with the others if they come along, and alone if they do not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

GRACE = 1.0  # seconds to leave in peace
GRACE_WHILE_SAVING = 0.3  # seconds on top
INTERRUPTED = 130  # the exit code of what was interrupted
_DONE = 255  # no signal has this number


def requests() -> set[signal.Signals]:
    """The signals that ask to end. So does a terminal that is closed, unless we were started to outlive it (nohup)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return {signal.SIGINT, signal.SIGTERM} | (set() if outlives else {signal.SIGHUP})


class Leaving:
    """Notes that this worker was asked to end, while this is open, and ends it if it does not get there by itself.

    Python runs a signal's handler when the main thread is back in Python, and a worker whose peer has gone may wait for
    it in torch for minutes. So a thread listens, and when the time is up it ends the process.

    Attributes:
        asked: whether somebody asked.
        saving: whether it is worth waiting a little longer.
        last_words: what the thread says before it ends the process.
    """

    def __init__(self, last_words: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self.saving = False
        self.last_words = last_words
        self._left = threading.Event()
        self._before: dict[int, object] = {}

    def __enter__(self) -> Leaving:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        self._requests = requests()
        for number in self._requests:
            self._before[number] = signal.signal(number, lambda *_: None)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="thinwire-leaving", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.write(self._writer, bytes([_DONE]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _listen(self) -> None:
        while not set(os.read(self._reader, 64)) & self._requests:
            if self._left.is_set():
                return
        self.asked = True
        if not self._left.wait(GRACE) and not (self.saving and self._left.wait(GRACE_WHILE_SAVING)):
            self.last_words()
            os._exit(INTERRUPTED)
