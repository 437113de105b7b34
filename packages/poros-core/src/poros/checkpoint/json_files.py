"""Reading JSON that somebody else wrote: bounded, without repeated keys, with the place of a fault."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from poros.errors import CheckpointError, explain

__all__ = ["parse_json", "read_json_object"]

# The index of a model with a hundred thousand tensors has about 10 MB.
MAX_JSON_BYTES = 100_000_000


def parse_json(raw: bytes, where: str) -> Any:
    """Parse UTF-8 JSON; ``where`` names it in messages.

    Raises:
        CheckpointError: not UTF-8, not JSON (with line and column), or an object that repeats a key.
    """
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        got, place = error.msg, f"{where}:{error.lineno}:{error.colno}"
    except UnicodeDecodeError as error:
        got, place = f"a byte that is not UTF-8 at {error.start}", where
    except _RepeatedKeyError as error:
        got, place = f"the key `{error}` twice", where
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of thousands of digits
        got, place = str(error), where
    raise CheckpointError(explain("Cannot parse JSON", expected="valid JSON", got=got, where=place))


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        CheckpointError: missing, unreadable, too large, or not one JSON object.
    """
    try:
        status = path.stat()
        num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):  # a pipe may never end, a device may never be empty
            raise CheckpointError(
                explain("Cannot read JSON", expected="a file", got="something else", where=str(path))
            )
        if num_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                explain(
                    "Cannot read JSON",
                    expected=f"at most {MAX_JSON_BYTES} bytes",
                    got=f"{num_bytes} bytes",
                    where=str(path),
                )
            )
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            explain(
                "Cannot read JSON", expected="a readable file", got=error.strerror or error, where=str(path)
            )
        ) from error
    content = parse_json(raw, str(path))
    if not isinstance(content, dict):
        raise CheckpointError(
            explain("Cannot use JSON", expected="an object", got=type(content).__name__, where=str(path))
        )
    return content


class _RepeatedKeyError(Exception):
    pass


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; a repeated key could hide a second description of the same tensor."""
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return content
