"""Everybody who is told what a run does. The run's own record must not fail; a reporter may, and changes nothing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poros.determinism import preserved_generator
from poros.plugins import Registered
from poros.run.events import Reporter, StartEvent

__all__ = ["MAX_FAULTS", "Audience"]

# A reporter that failed this often is no longer called: a lost connection does not cost its time-out at every step.
MAX_FAULTS = 3


@dataclass(slots=True)
class _Guest:
    """A reporter, where it comes from, and how often it failed."""

    reporter: Reporter
    described: str
    num_faults: int = 0


class Audience:
    """Tells events to the run's own record first, then to the reporters.

    Attributes:
        notes: what was said while the run went on: a sentence per reporter that failed, and one per reporter that is no
            longer called.
    """

    def __init__(
        self,
        own: Sequence[Reporter],
        reporters: Sequence[Reporter | Registered[Reporter]],
        device: torch.device,
    ) -> None:
        """Keep who is told.

        Args:
            own: an exception of one of these goes on to the caller.
            reporters: an exception of one of these is a note; plugins' come with their distribution.
            device: its generator is put back after a reporter was called.
        """
        self._own = tuple(own)
        self._guests = [_Guest(*_described(reporter)) for reporter in reporters]
        self._device = device
        self.notes: list[str] = []

    def tell(self, method: str, *arguments: Any) -> None:
        """Call ``method`` of everybody."""
        for reporter in self._own:
            getattr(reporter, method)(*arguments)
        for guest in self._guests:
            if guest.num_faults < MAX_FAULTS or method == "on_close":
                self._tell_guest(guest, method, arguments)

    def owned(self) -> tuple[str, ...]:
        """Return the entries of the output folder that reporters write."""
        return tuple(name for guest in self._guests for name in guest.reporter.owned)

    def say(self, sentence: str) -> None:
        """Show a sentence to the user now, and keep it for the run's record."""
        self.notes.append(sentence)
        # `-W error` makes an exception of it, and a closed terminal or pipe may be the very fault.
        with contextlib.suppress(Exception):
            warnings.warn(sentence, UserWarning, stacklevel=2)

    def _tell_guest(self, guest: _Guest, method: str, arguments: Sequence[Any]) -> None:
        try:
            with _unchanged(self._device):
                getattr(guest.reporter, method)(*(_own_copy(argument) for argument in arguments))
        except (Exception, SystemExit) as error:  # a second Ctrl-C still ends the run
            guest.num_faults += 1
            if guest.num_faults == 1:
                what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: ")
                self.say(
                    f"Reporter {guest.described} failed in `{method}`: {what}. Training goes on; after {MAX_FAULTS} "
                    "faults it is no longer called."
                )
            if guest.num_faults == MAX_FAULTS:
                self.say(f"Reporter {guest.described} failed {MAX_FAULTS} times and is no longer called.")


def _described(reporter: Reporter | Registered[Reporter]) -> tuple[Reporter, str]:
    if isinstance(reporter, Registered):
        return reporter.value, f"`{reporter.value.name}` of distribution `{reporter.distribution}`"
    return reporter, f"`{type(reporter).__module__}.{type(reporter).__qualname__}`"


def _own_copy(argument: Any) -> Any:
    """Return an event that a reporter may write into: the record of the start is the run's, and goes to its file."""
    if isinstance(argument, StartEvent):
        return dataclasses.replace(argument, record=copy.deepcopy(dict(argument.record)))
    return argument


@contextlib.contextmanager
def _unchanged(device: torch.device) -> Iterator[None]:
    """Put back what a reporter may leave behind and the training reads: generators and autograd's switch."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_generator(torch.device("cpu")))
        if device.type != "cpu":
            stack.enter_context(preserved_generator(device))
        # Restores the mode that was on; it switches nothing by itself.
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        yield
