"""A headless Chromium to look at pages with, driven over a pipe by the DevTools protocol; nothing but Python is needed.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--remote-debugging-pipe",
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--mute-audio",
)


class Chromium:
    """One page, `width` x `height`. What it writes to its console is in `complaints`."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip(f"there is no Chromium here (looked for {', '.join(NAMES)})")
        pipes = (*os.pipe(), *os.pipe())
        # Chromium reads commands from 3 and answers on 4: numbers that the pipes must not have themselves.
        to_read, self._writing, self._reading, to_write = (fcntl.fcntl(p, fcntl.F_DUPFD_CLOEXEC, 10) for p in pipes)
        for pipe in pipes:
            os.close(pipe)
        handed_over = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", handed_over, "-", found, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._loaded = False
        self._session = ""
        self.complaints: list[str] = []
        pages = [each for each in self._ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        target = pages[0]["targetId"] if pages else self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._reading)
        os.close(self._writing)

    def show(self, file: Path, *, is_dark: bool = False) -> None:
        """Load `file` and wait until it has been drawn."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[feature])
        self._loaded = False
        self._ask("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._hear()
        self.drawn()

    def drawn(self) -> None:
        """Wait for two frames: what has been asked for is on the screen then."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def value(self, script: str) -> Any:
        """What `script` gives, as JSON can hold it."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._ask("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """`kind`: Moved, Pressed, Released, Wheel."""
        self._ask("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def picture(self, file: Path, *, is_whole: bool = True) -> None:
        """A screenshot, of the whole page or of what is in view."""
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": params}
        os.write(
            self._writing, json.dumps(asked | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            said = self._hear()
            if said.get("id") == number:
                assert "error" not in said, said
                return dict(said["result"])

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._reading, 1 << 20)
            assert more, "Chromium has gone"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        said: dict[str, Any] = json.loads(text)
        params = said.get("params", {})
        match said.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.complaints.append(str(params))
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("file:"):
                self.complaints.append(f"asks for {params['request']['url'][:200]}")
        return said
