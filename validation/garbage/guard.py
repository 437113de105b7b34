"""One input under guard: time, address space, files, processes, sockets and code."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from garbage.values import CANARY

__all__ = ["Guard", "Outcome", "TimeUpError", "limit_memory"]

# Nothing that is tried has more than a few hundred KB: what asks for this much was told to by a forged number.
ADDRESS_SPACE_BYTES = 512 * 2**20
# A busy machine gives a process a small share of its time.
WAITING = 12
# Words of an allocation that failed and was wrapped into another error.
ALLOCATION_WORDS = ("MemoryError", "can't allocate memory", "std::bad_alloc", "malloc of size")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    *("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("os.chown", "os.utime", "shutil.rmtree", "shutil.move"),
)
FORBIDDEN = (
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *(
        "pickle.find_class",
        "marshal.load",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.bind",
        "ctypes.dlopen",
    ),
)


class TimeUpError(BaseException):
    """An input took too long; no `except Exception` holds it."""


@dataclass(slots=True)
class Outcome:
    """What became of one input: ``works``, ``refused`` (one message, exit code 2) or ``bug``."""

    kind: str
    detail: str = ""


def limit_memory() -> None:
    """Let the process take no more address space than it has now and `ADDRESS_SPACE_BYTES`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


@dataclass(slots=True)
class Guard:
    """Watches a process by an audit hook, which is there to stay.

    Attributes:
        allowed: folders that may be written to.
        inputs: folder of the inputs, from which no code may come.
        seconds: CPU time that one input may take; waiting, it may take `WAITING` times that.
    """

    allowed: tuple[Path, ...]
    inputs: Path
    seconds: float
    _watching: bool = False
    _seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sys.addaudithook(self._audit)
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, self._time_up)

    def judge(self, use: Callable[[], object]) -> Outcome:
        """Run one use of an input and say what became of it."""
        self._seen.clear()
        outcome = Outcome("works")
        try:
            with self._watched(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use()
        except TimeUpError:
            return Outcome(
                "bug", f"more than {self.seconds} s of CPU time, or {WAITING * self.seconds} s of waiting"
            )
        except BaseException as error:  # what Rust panics with is no `Exception`
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = _of_error(error)
        if self._seen:
            return Outcome("bug", "; ".join(self._seen[:5]))
        if (self.inputs / CANARY).exists():
            (self.inputs / CANARY).unlink()
            return Outcome("bug", "code of an input was executed")
        return outcome

    @contextmanager
    def _watched(self) -> Iterator[None]:
        # A loop inside a library sees no signal: then the process ends and says where it was.
        faulthandler.dump_traceback_later(2 * WAITING * self.seconds, exit=True)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        signal.setitimer(signal.ITIMER_REAL, WAITING * self.seconds)
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()

    @staticmethod
    def _time_up(*_: Any) -> None:
        raise TimeUpError

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = flags & WRITING if isinstance(flags, int) else set(str(mode)) & set("wax+")
            if writes and isinstance(path, str | bytes | os.PathLike):
                self._check(event, path)
        elif event in CHANGES:
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._check(event, path)
        elif event in FORBIDDEN:
            self._seen.append(f"{event}{arguments!r:.200}")
        elif event == "exec":
            name = getattr(arguments[0], "co_filename", "")
            if str(name).startswith(str(self.inputs)):
                self._seen.append(f"exec of {name}")

    def _check(self, event: str, path: Any) -> None:
        place = os.path.realpath(os.path.abspath(os.fsdecode(path)))
        if place != os.devnull and not any(Path(place).is_relative_to(folder) for folder in self.allowed):
            self._seen.append(f"{event} of {place}")


def _of_error(error: BaseException) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    if any(word in text for word in ALLOCATION_WORDS):
        places = [
            f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-5:]
        ]
        return Outcome("bug", f"an allocation: {text[:300]} ({' '.join(places)})")
    if getattr(error, "exit_code", None) != 2:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("bug", f"{text[:500]} ({Path(frame.filename).name}:{frame.lineno})")
    return Outcome("refused", text[:300])
