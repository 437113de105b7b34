"""What reaches a terminal: text as it was meant, without what a terminal would obey.

Names, rows, templates and answers come from elsewhere. An escape sequence in them could clear the screen, forge a line
or change the window's title; an override of the writing direction could show a name backwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

__all__ = ["TerminalConsole", "printable"]

# Control characters but tab and line feed, separators that some programs take for line breaks, overrides of the
# writing direction, and halves of surrogate pairs, which no output can encode.
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, max_characters: int | None = None) -> str:
    r"""Return ``text`` with everything that a terminal would obey as an escape such as ``\x1b``.

    Args:
        max_characters: of a longer text, the beginning and how many characters were left out.
    """
    if max_characters is not None and len(text) > max_characters:
        text = f"{text[:max_characters]} ...({len(text) - max_characters} more characters)"
    return OBEYED.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class TerminalConsole(Console):
    """A console whose only escape sequences are its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments; text is made `printable`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
