"""The report in a headless Chromium: nothing is wider than the screen, nothing is requested, nothing is logged.

`POROS_PICTURES=folder` keeps the pictures for people to look at.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poros_cli.report import read_run, write_report

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (390, 1280)
NUM_BLOCKS, NUM_STEPS = 64, 1500


class Chromium:
    """A page of a headless Chromium, spoken to over a pipe: JSON messages with a zero byte between them."""

    def __init__(self, profile: Path) -> None:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        assert program, f"--browser: expected one of {', '.join(NAMES)} on the PATH, got none"
        # It reads from descriptor 3 and writes to 4.
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, str(profile)],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come in between are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return dict(answer["result"])

    def open(self, path: Path, width: int, *, dark: bool = False) -> None:
        """Load a page on a screen of this width and wait until it is there."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=path.as_uri())
        while not self.seen("Page.loadEventFired"):
            self.events.append(self._next())

    def seen(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of this kind since the page was asked for."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self) -> bytes:
        """Return the whole page as PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._to)
        os.close(self._from)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "Chromium ended"
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(message))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run as a 32B model on a GPU would leave it, with names as long as they come."""
    folder = tmp_path_factory.mktemp("run") / ("a-run-with-a-name-" * 8)
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record()))
    lines = [step_line(step) for step in range(1, NUM_STEPS + 1)]
    lines += [{"step": step, "eval_loss": 1.2 + 40 / (step + 40)} for step in range(100, NUM_STEPS + 1, 100)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(read_run(folder), folder / "report.html")
    return folder / "report.html"


def step_line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.1 + 40 / (step + 30) + 0.05 * ((step * 7919) % 13) / 13,
        "learning_rate": 2e-4 * (1 - step / NUM_STEPS),
        "grad_norm": 0.4 + 3 / step + ((step * 104729) % 17) / 40,
        "tokens": 4096,
        "supervised_tokens": 1800,
        "seconds": 2.04 + ((step * 31) % 11) / 100,
        "tokens_per_second": 4096 / (2.04 + ((step * 31) % 11) / 100),
        "h2d_bytes": 32_000_000_000,
        "exposed_copy_seconds": 0.08 + ((step * 31) % 7) / 100,
        "peak_device_bytes": 9_700_000_000 + 100_000_000 * (step > 300),
        "grown_host_bytes": 17_200_000_000 + 200_000 * step,
    }


def record() -> dict[str, Any]:
    path = "/a/very/long/path/" + "without-a-place-to-break" * 6
    plan = {
        "residency": "streamed",
        "num_slots": 3,
        "resident_blocks": 8,
        "head": "host",
        "activations": "host",
    }
    plan |= {"order": "block-major", "workspace": True, "graphs": True, "pin_host_memory": True}
    source = {"name": path, "weight": 1.0, "num_files": 1, "schemas": {"messages": 12000}, "num_rows": 11950}
    data = {"sources": [{**source, "ignored": []}], "num_rows": 11950, "schemas": {"messages": 12000}}
    data |= {"dropped": {"longer than max_length": {"count": 50, "first_line": 9, "first": "line 9"}}}
    data |= {"truncated": {}, "cut_tokens": 0, "repaired": None, "lost_turns": {}, "supervised_tokens": 900}
    data |= {
        "total_tokens": 2000,
        "longest_tokens": 512,
        "lengths": {64: 3000, 128: 6000, 256: 2500, 512: 500},
    }
    data |= {"last_supervised_token": "<|im_end|>", "last_supervised_id": 9, "warnings": [path], "notes": []}
    receipt = {"claim": "residency", "subject": "qwen2.5-32b", "weight_format": "nf4", "torch": "2.11.0"}
    return {
        "model": {
            "name": path,
            "architecture": "qwen2",
            "status": "validated",
            "platform": "bitwise equality was measured on this very platform (NVIDIA H200, torch 2.11.0)",
            "receipts": [{**receipt, "device_name": "NVIDIA H200"}] * 3,
        },
        "device": "NVIDIA H200",
        "num_blocks": NUM_BLOCKS,
        "plan": plan,
        "settings": {"output": path},
        "config": {"data": path, "optimizer.learning_rate": 2e-4, "lora.targets": ["q_proj"] * 30},
        "fingerprint": {"num_steps": NUM_STEPS, "optimizer.max_grad_norm": 1.0, "data.data": "f" * 300},
        "budget": {
            "device_bytes": 10 * 10**9,
            "device_limit": "the `vram` budget",
            "host_bytes": 120 * 10**9,
            "host_limit": "free memory of this machine",
            "frugal": False,
        },
        "binding": "link",
        "rates": {"origin": "measured on this device", "measured": True, "link_bytes_per_second": 55.3e9},
        "predicted_device_bytes": {"slots": 6 * 10**9, "block working set": 3 * 10**9, "context": 6 * 10**8},
        "predicted_host_bytes": {"block store": 16 * 10**9, "boundary activations": 10**9},
        "predicted_step": {"seconds": 2.0, "tokens": 4096},
        "predicted_timeline": {
            "passes": 1,
            "num_blocks": NUM_BLOCKS,
            "resident_blocks": 8,
            "num_slots": 3,
            "lowest_backward": 0,
            "blocks": [[NUM_BLOCKS, 0.009, 0.008, 0.022]],
            "chunk_copies": [0.003] * 10,
            "head": 0.002,
            "loss": 0.0,
            "row_out": 0.001,
            "row_in": 0.001,
        },
        "first_step": 300,
        "result": None,
        "failure": "Optimizer step 1501 is not finite: expected a finite loss, got nan.",
        "data": {"training": data, "held_out": None},
        "notes": [path],
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_the_screen_and_requests_nothing(
    chromium: Chromium, page: Path, width: int, dark: bool
) -> None:
    chromium.open(page, width, dark=dark)
    chromium.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    picture = chromium.picture()
    if folder := os.environ.get("POROS_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"report-{width}-{'dark' if dark else 'light'}.png").write_bytes(picture)
    assert chromium.value("document.documentElement.scrollWidth") == width
    requested = [event["request"]["url"] for event in chromium.seen("Network.requestWillBeSent")]
    assert [url for url in requested if not url.startswith("data:")] == [page.as_uri()]
    assert not chromium.seen("Log.entryAdded")
    assert not chromium.seen("Runtime.exceptionThrown")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_is_smaller_than_a_phone_shows_well(chromium: Chromium, page: Path, width: int) -> None:
    chromium.open(page, width)
    # Text in a picture is scaled with it.
    smallest = (
        "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
    )
    assert chromium.value(smallest) >= 10
