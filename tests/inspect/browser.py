"""A headless chromium that tests can drive: the DevTools protocol over a pipe, with nothing but the standard library.

    with Browser() as browser:
        browser.open(path, width=1280, height=900)
        browser.evaluate("document.title")

Commands are JSON on file descriptor 3 of the browser, answers and events come on its descriptor 4, each ended by a NUL.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"]  # fmt: skip
PATIENCE = 60.0  # seconds for an answer


class Browser:
    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.profile = tempfile.TemporaryDirectory()
        self._ours, theirs = os.pipe()  # what the browser writes
        reads, self._to = os.pipe()
        # Descriptors 3 and 4 belong to the browser's end, wherever the pipes are here.
        command = f'exec "$@" 3<&{reads} 4>&{theirs}'
        arguments = [CHROMIUM, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments], pass_fds=(reads, theirs), stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(theirs)
        self._rest, self._id, self._session = b"", 0, None
        self.said: list[dict[str, Any]] = []  # events
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._to)
        os.close(self._ours)
        self.profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            answer = self._next()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.said.append(answer)
        raise TimeoutError(method)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._ours, 1 << 16)
            assert got, "the browser has ended"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def show(self, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        """The size of the window and the colours that the reader prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=width < 600)  # fmt: skip
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def open(self, path: Path) -> None:
        """Load a page and wait until it has drawn itself once."""
        self.said.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.shown")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, a promise's when it is kept."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Until an expression is true: its value."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.02)
        raise TimeoutError(expression)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element of a selector."""
        name = json.dumps(selector)
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({name}); e.scrollIntoView({{block: 'center'}}); "
            "const r = e.getClientRects()[0]; return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A screenshot as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        path.write_bytes(base64.b64decode(data))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def complaints(self) -> list[str]:
        """Errors, violations of the page's policy, and requests for anything but itself."""
        self.evaluate("0")
        found = []
        for event in self.said:
            name, about = event.get("method"), event.get("params", {})
            if name == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"]))
            elif name == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(about["entry"]["text"])
            elif name == "Network.requestWillBeSent" and not about["request"]["url"].startswith(("file:", "blob:")):
                found.append(about["request"]["url"])
        return found
