"""The rules of the output folder, checked before anything expensive starts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from poros.errors import ConfigError, OutputError, explain

__all__ = ["check_free_space", "prepare_output_folder"]

GIB = 2**30


def prepare_output_folder(
    folder: Path, *, resume: bool = False, overwrite: bool = False, owned: Iterable[str] = ()
) -> Path:
    """Create the output folder, or refuse it, and return it.

    Args:
        resume: content is expected and stays.
        overwrite: the entries that a run writes are removed; any other content stays.
        owned: names of those entries. A stale checkpoint must not be found by a later resume.

    Raises:
        ConfigError: ``resume`` and ``overwrite`` together.
        OutputError: it is a file, cannot be created or written, or has content and neither switch is given.
    """
    if resume and overwrite:
        raise ConfigError(
            "Cannot use `--resume` and `--overwrite` together: the one keeps what the other removes."
        )
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            explain("Cannot use the output folder", expected="a folder", got="a file", where=str(folder))
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The permission bits do not tell: the file system may be read-only.
        with tempfile.TemporaryFile(dir=folder):
            pass
        content = sorted(path.name for path in folder.iterdir())
        if content and not resume and not overwrite:
            raise OutputError(
                explain(
                    "The output folder is not empty",
                    expected="an empty or new folder",
                    got=f"{len(content)} entries ({', '.join(content[:4])})",
                    where=str(folder),
                    next_step="Continue that run with `--resume`, replace it with `--overwrite`, or name another",
                )
            )
        if overwrite:
            for name in owned:
                _remove(folder / name)
    except OSError as error:
        raise OutputError(
            explain(
                "Cannot use the output folder",
                expected="a folder that can be written",
                got=error.strerror or error,
                where=str(folder),
                next_step="Name another folder",
            )
        ) from error
    return folder


def check_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Check the free disk space where ``folder`` is or will be.

    Raises:
        OutputError: fewer than ``needed_bytes`` are free; ``what`` says for what they are needed.
    """
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise OutputError(
            explain(
                f"Not enough disk space for {what}",
                expected=f"{needed_bytes} bytes free ({needed_bytes / GIB:.2f} GiB)",
                got=f"{free} bytes ({free / GIB:.2f} GiB)",
                where=str(folder),
                next_step="Free some space or name another folder",
            )
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
