"""Ctrl-C and SIGTERM: the first asks the run to stop after its step, the second ends the process at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["stop_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call ``request_stop`` on the first signal and raise ``KeyboardInterrupt`` on the second, while inside.

    The second leaves the handling of further ones to the system, which ends the process: what unwinds then may itself
    hang, on a device for example. Python delivers signals to the main thread only; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            raise KeyboardInterrupt
        seen = True
        request_stop()

    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
