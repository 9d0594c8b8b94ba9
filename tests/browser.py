"""Real browser for tests: Debian's chromium, controlled by chromedriver over HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "no chromium and chromedriver here: apt-get install chromium chromium-driver"
ANSWER_TIMEOUT_S = 120.0


class Browser:
    """Session of a browser with one page."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run `script` as the body of a function in the page; return the function's result."""
        return self._post("execute/sync", {"script": script, "args": arguments})

    def wait_for(self, condition: str) -> Any:
        """Return the value of an expression once it is true. Raises AssertionError after
        ANSWER_TIMEOUT_S."""
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < end, f"not true after {ANSWER_TIMEOUT_S} s: {condition}"
            time.sleep(0.05)
        return value

    def show_as(self, *, width: int, height: int = 800, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._devtools("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key})

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._get("screenshot")))

    @property
    def complaints(self) -> list[str]:
        """Return errors and warnings in the browser's console."""
        entries = self._post("se/log", {"type": "browser"})
        return [one["message"] for one in entries if one["level"] in ("SEVERE", "WARNING")]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, name: str, body: dict[str, Any]) -> Any:
        return _request(f"{self._session}/{name}", body)

    def _get(self, name: str) -> Any:
        return _request(f"{self._session}/{name}", None)


def _request(url: str, body: dict[str, Any] | None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        return json.load(response)["value"]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Yield a browser that stores its profile in `folder`."""
    assert DRIVER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += [f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--hide-scrollbars"]
    settings = {
        "goog:chromeOptions": {"binary": BROWSER, "args": options},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        capabilities = {"capabilities": {"alwaysMatch": settings}}
        session = _request(f"http://127.0.0.1:{port}/session", capabilities)["sessionId"]
        url = f"http://127.0.0.1:{port}/session/{session}"
        try:
            yield Browser(url)
        finally:
            _request(url, None, "DELETE")
    finally:
        driver.terminate()
        driver.wait()


def _wait_for_port(port: int) -> None:
    end = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
        else:
            return
