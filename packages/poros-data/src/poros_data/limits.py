"""How much a chat template may take. It is a program that came with a model: sandboxed, and bounded here."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poros_data.errors import DataError, explain

__all__ = ["bounded_template"]

# Of one conversation. Stock templates take a millisecond and a few hundred KB.
CPU_SECONDS = 2.0
ADDRESS_SPACE_BYTES = 4 * 2**30


@contextlib.contextmanager
def bounded_template() -> Iterator[None]:
    """Stop a template that takes more than `CPU_SECONDS` or `ADDRESS_SPACE_BYTES`.

    Time is bounded in the main thread of POSIX systems, memory on Linux besides; elsewhere nothing is.

    Raises:
        DataError: it was stopped.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    # CPU time of this process: a machine that is busy with something else stops nobody's template.
    earlier = signal.signal(signal.SIGVTALRM, _time_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        with _bounded_memory():
            yield
    except MemoryError as error:
        raise _stopped(f"memory of at most {ADDRESS_SPACE_BYTES} bytes", "more") from error
    except _TimeUpError as error:
        raise _stopped(f"at most {CPU_SECONDS:g} s for one conversation", "no end") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)


class _TimeUpError(BaseException):
    """Not an `Exception`: whatever a renderer catches, this one passes."""


def _time_up(*_: Any) -> None:
    raise _TimeUpError


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + ADDRESS_SPACE_BYTES
    if soft != resource.RLIM_INFINITY and soft <= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _stopped(expected: str, got: str) -> DataError:
    return DataError(
        explain(
            "The chat template was stopped",
            expected=expected,
            got=got,
            next_step="Name another template with `rows.template`",
        )
    )
