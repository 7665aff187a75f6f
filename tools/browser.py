"""Headless Chromium, driven through its DevTools protocol: real clicks, keys and screenshots."""

import base64
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 60.0  # on a machine that does other things too
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
KEYS |= {"ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One tab; `complaints` are its console's errors and uncaught exceptions, `loads` all URLs."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []
        self.loads: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(PATIENCE_S))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(json.dumps(params["entry"])[:500])
            case "Network.requestWillBeSent":
                self.loads.append(params["request"]["url"])

    def settle(self) -> None:
        self.evaluate("new Promise((done) => setTimeout(done))")

    def take_complaints(self, words: str) -> int:
        """Remove the complaints with these words, as those that a test causes, and count them."""
        self.settle()
        others = [each for each in self.complaints if words not in each]
        taken = len(self.complaints) - len(others)
        self.complaints = others
        return taken

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, code: str) -> Any:
        made = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in made, (code, made)
        return made["result"].get("value")

    def wait(self, condition: str) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not (value := self.evaluate(condition)):
            assert time.monotonic() < end, (condition, self.evaluate("document.body.innerText"))
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """Press the mouse on the middle of what a user sees of an element."""
        x, y = self.evaluate(f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: "center"}});
            const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        about = {"key": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {"Enter": "\r", " ": " "}.get(key)
        down = about | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option; the list that a select opens is not part of the page."""
        self.evaluate(f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.value = {json.dumps(value)};
            for (const kind of ["input", "change"])
                found.dispatchEvent(new Event(kind, {{bubbles: true}}));
        }})()""")

    def show_as(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """Run Chromium with an empty profile."""
    with tempfile.TemporaryDirectory(prefix="page", ignore_cleanup_errors=True) as folder:
        flags = ["--headless", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        flags += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "about:blank"]
        process = subprocess.Popen(
            [program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with connect(_tab(Path(folder) / "DevToolsActivePort", process), max_size=None) as tab:
                yield Browser(tab)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _tab(file: Path, process: "subprocess.Popen[bytes]") -> str:
    """Return the address of the first tab, as soon as there is one."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, "Chromium ended"
        with suppress(OSError, ValueError, IndexError, StopIteration, ConnectionClosed):
            port = int(file.read_text().splitlines()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = json.load(answer)
            tab = next(each for each in tabs if each["type"] == "page")
            return str(tab["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")
