"""Names and links that other people's files hold: nothing outside the folder that the user named is read for them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from poros.errors import CheckpointError, explain

__all__ = ["is_plain_name", "is_relative_path", "refuse_links_outside"]

# Of one component; what Linux, macOS and Windows take.
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095
# A hub's cache keeps `snapshots/<revision>/<file>` as links to `blobs/<hash>` beside it.
SNAPSHOTS, BLOBS = "snapshots", "blobs"


def is_plain_name(name: object) -> bool:
    """Say whether a text names an entry of a folder on every system, and nothing else.

    Separators, drives, a leading dot, control characters, half characters and overlong names are refused.
    """
    if not isinstance(name, str) or not name or name[0] == "." or any(c in "/\\:\0" for c in name):
        return False
    try:
        return name.isprintable() and len(name.encode("utf-8")) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def is_relative_path(name: object) -> bool:
    """Say whether a text is a path below a folder, written with ``/``, of plain names."""
    if not isinstance(name, str) or len(name) > MAX_PATH_BYTES:
        return False
    return PurePosixPath(name).as_posix() == name and all(map(is_plain_name, name.split("/")))


def refuse_links_outside(folder: Path, patterns: Iterable[str] = ("*",)) -> None:
    """Refuse entries of ``folder`` that are links to somewhere outside it.

    The links of a hub's cache lead to the folder ``blobs`` of the same repository and are fine. The folder itself may
    be reached by a link.

    Args:
        folder: it need not exist.
        patterns: of the names that are looked at.

    Raises:
        CheckpointError: naming the link and where it leads.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == SNAPSHOTS:
        allowed.append(root.parent.parent / BLOBS)
    wanted = tuple(patterns)
    try:
        links = [path for path in sorted(root.iterdir()) if path.is_symlink()] if root.is_dir() else []
        for path in links:
            if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in wanted):
                continue
            target = path.resolve()
            if not any(target.is_relative_to(place) for place in allowed):
                raise CheckpointError(
                    explain(
                        "A link leaves its folder",
                        expected=f"`{path.name}` to be a file, or a link inside the folder or a hub's cache",
                        got=f"a link to {target}",
                        where=str(folder),
                        next_step="Copy the file into the folder, or name the folder that holds all of them",
                    )
                )
    except (OSError, RuntimeError) as error:  # links in a circle
        raise CheckpointError(f"Cannot read {folder}: {error}.") from error
