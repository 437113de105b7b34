"""A hook of MkDocs: pages link to files of the repository outside docs/, and the site gets copies of those.

Receipts, examples and the validation pages are what claims rest on: a link to them must work in the built site too, and
a link to a file that does not exist must fail the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_page_markdown", "outside_links"]

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
# Pages: copied as they are, they would be rendered, with links of their own.
RENDERED = ".md"


def outside_links(text: str) -> set[str]:
    """Return the paths, seen from the repository's root, that a page of docs/ links to outside of it."""
    return set(LINK.findall(text))


def on_files(files: Files, config: Any) -> Files:
    """Add every linked file to the site. A link to a folder or to nothing is left for MkDocs to complain about."""
    wanted = set()
    for page in files.documentation_pages():
        wanted |= outside_links(page.content_string)
    for path in sorted(wanted):
        source = ROOT / path
        if source.is_file():
            files.append(File.generated(config, _place(path), content=source.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links at the copies."""

    def pointed(match: re.Match[str]) -> str:
        place = _place(match[1])
        return f"]({place}" if files.get_file_from_path(place) else match[0]

    return LINK.sub(pointed, markdown)


def _place(path: str) -> str:
    """Return where a copy lies in the site: Markdown as text, so that nothing renders it."""
    return f"repository/{path}.txt" if path.endswith(RENDERED) else f"repository/{path}"
