"""Check that installed distributions are wheels, not checkouts, and that their entry points load."""

from __future__ import annotations

import importlib.metadata
import json
import sys

# poros-data registers nothing: it is a library that the command line uses.
WITHOUT_ENTRY_POINT = {"poros-core", "poros-data"}


def problems(distribution: str) -> list[str]:
    """Return what is wrong with one installed distribution, in words."""
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return [f"{distribution}: not installed"]
    found = []
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        found.append(f"{distribution}: editable, not from a wheel")
    entries = [entry for entry in installed.entry_points if entry.group == "poros"]
    if not entries and distribution not in WITHOUT_ENTRY_POINT:
        found.append(f"{distribution}: no entry point in group `poros`")
    for entry in entries:
        try:
            entry.load()
        except Exception as error:
            found.append(f"{distribution}: entry point `{entry.name}` fails: {type(error).__name__}: {error}")
    if not any(str(file).endswith("py.typed") for file in installed.files or ()):
        found.append(f"{distribution}: no py.typed")
    return found


if __name__ == "__main__":
    complaints = [line for name in sys.argv[1:] for line in problems(name)]
    print("\n".join(complaints) or f"{len(sys.argv) - 1} distributions are installed from wheels and load.")
    sys.exit(bool(complaints))
