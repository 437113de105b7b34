"""A side stream for copies on a GPU; plain calls in order on the CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["CopyLane", "mark", "wait"]

Event = torch.cuda.Event | None


def mark(device: torch.device) -> Event:
    """Return an event after everything issued so far on the current stream; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait(device: torch.device, event: Event) -> None:
    """Order what the current stream does from here on after ``event``."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


class CopyLane:
    """Copies that run beside the compute stream, in the order in which they are issued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Event]) -> Event:
        """Copy ``source`` to ``target`` after the given events; return the event of its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            for event in after:
                if event is not None:
                    self._stream.wait_event(event)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done
