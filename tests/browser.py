"""Chromium without a window: what a page draws, fetches and complains of."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE = 60.0
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here (Debian package chromium)")


class Browser:
    """Chromium without a window, spoken to over two pipes by its DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        assert BROWSER is not None
        program = (
            f"import os, sys; os.dup2({theirs_in}, 3); os.dup2({theirs_out}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        )
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, BROWSER, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._reader, self._writer = ours_in, ours_out
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            piece = os.read(self._reader, 1 << 20)
            assert piece, "the browser has gone"
            self._rest += piece
        whole, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        return message

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page and come back when its script has ended."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """The whole page, as tall as it is."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[Any]:
        """Everything that the page's console says, and every exception."""
        self.ask("1")
        told = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in told]

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [*sent, *self.ask("performance.getEntriesByType('resource').map(entry => entry.name)")]

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        self._process.wait(PATIENCE)
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, until the end."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()


def drawn(browser: Browser) -> dict[str, int]:
    """How many shapes each chart that was drawn has."""
    shapes = "figure.querySelectorAll('.plot > svg path, .plot > svg rect').length"
    found: dict[str, int] = browser.ask(
        f"Object.fromEntries([...document.querySelectorAll('figure[data-drawn]')].map(figure => [figure.id, {shapes}]))"
    )
    return found


def assert_fine(browser: Browser, path: Path) -> None:
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    nowhere = "attribute => /NaN|null|undefined/.test(attribute.value)"
    shapes = "[...document.querySelectorAll('.plot > svg *')].filter(shape => [...shape.attributes]"
    assert browser.ask(f"{shapes}.some({nowhere})).length") == 0, "something is drawn at a place that is none"
