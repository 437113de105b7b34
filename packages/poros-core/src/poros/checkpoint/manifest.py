"""The completeness marker of a folder that Poros writes: file sizes and hashes, written last."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.paths import is_relative_path, refuse_links_outside
from poros.errors import CheckpointError, explain

__all__ = ["MANIFEST_FILE", "check_manifest", "write_manifest"]

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1


def write_manifest(folder: Path) -> None:
    """Write ``manifest.json`` for every file that lies in ``folder`` now."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST_FILE
    }
    content = {"format_version": FORMAT_VERSION, "files": files}
    (folder / MANIFEST_FILE).write_text(
        json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def check_manifest(folder: Path, *, hashes: bool = True) -> None:
    """Check that every file of the manifest is there in its full size and, with ``hashes``, with its content.

    Files that the manifest does not name are left alone.

    Raises:
        CheckpointError: naming the first file that is missing, of another size or changed, or that is not in the
            folder at all.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise _incomplete(
            folder, f"`{MANIFEST_FILE}`, which is written last", "none: the save did not finish"
        )
    content = read_json_object(path)
    files = content.get("files")
    if content.get("format_version") != FORMAT_VERSION or not isinstance(files, dict):
        raise _incomplete(
            folder, f"a manifest of format {FORMAT_VERSION}", repr(content.get("format_version"))
        )
    refuse_links_outside(folder)
    for name, recorded in files.items():
        if not is_relative_path(name):
            raise _incomplete(folder, "names of files in the folder", f"{name!r:.80}")
        file = folder / name
        if not isinstance(recorded, dict):
            raise _incomplete(folder, f"size and hash of `{name}`", repr(recorded))
        if not file.is_file():
            raise _incomplete(folder, f"the file `{name}`", "no such file")
        num_bytes = file.stat().st_size
        if num_bytes != recorded.get("bytes"):
            raise _incomplete(folder, f"{recorded.get('bytes')} bytes in `{name}`", f"{num_bytes} bytes")
        if hashes and _sha256(file) != recorded.get("sha256"):
            raise _incomplete(folder, f"`{name}` as it was written", "other content of the same size")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _incomplete(folder: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        explain("Incomplete or damaged folder", expected=expected, got=got, where=str(folder))
    )
