"""Ways to damage bytes, texts and JSON trees, drawn from a seeded generator."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from garbage.values import NUMBERS, PIECES, Raw, evil_values

__all__ = ["dump", "mutate_bytes", "mutate_json", "mutate_text", "mutate_tree", "pack_header", "split_header"]

VALUES = evil_values()
MAX_CHANGES = 4
LENGTH_BYTES = 8


def mutate_bytes(rng: Random, raw: bytes) -> bytes:
    """Return ``raw`` after one to four changes."""
    content = bytearray(raw)
    for _ in range(rng.randint(1, MAX_CHANGES)):
        place = rng.randrange(len(content) + 1)
        length = min(rng.choice((1, 2, 8, 64, 1000)), len(content) - place)
        match rng.randrange(8):
            case 0:
                del content[place:]
            case 1:
                del content[place : place + length]
            case 2:
                content[place : place + length] = content[place : place + length] * 2
            case 3:
                content[place:place] = rng.randbytes(rng.choice((1, 8, 100)))
            case 4:
                number = rng.choice(NUMBERS) % 2**64
                content[place : place + 8] = number.to_bytes(8, rng.choice(("little", "big")))
            case 5 if length:
                content[place] ^= 1 << rng.randrange(8)
            case 6:
                content[place : place + length] = bytes(length)
            case 7 if rng.random() < 0.1:
                content.clear()
    return bytes(content)


def mutate_text(rng: Random, text: str, pieces: tuple[str, ...] = PIECES) -> str:
    """Return ``text`` with pieces put in, lines moved, doubled or left out."""
    for _ in range(rng.randint(1, MAX_CHANGES)):
        lines = text.split("\n")
        index = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                del lines[index]
            case 1:
                lines.insert(index, lines[rng.randrange(len(lines))])
            case 2:
                lines[index] = rng.choice(pieces)
            case 3:
                lines.insert(index, rng.choice(pieces))
            case 4:
                place = rng.randrange(len(lines[index]) + 1)
                lines[index] = lines[index][:place] + rng.choice(pieces) + lines[index][place:]
            case 5:
                head, colon, _ = lines[index].partition(":")
                lines[index] = head + colon + " " + rng.choice(pieces)
            case 6:
                lines[index] = rng.choice(("  ", "    ", "- ", "")) + lines[index].lstrip(
                    rng.choice((" ", ""))
                )
        text = "\n".join(lines)
    return text


def mutate_tree(rng: Random, tree: Any) -> Any:
    """Return a JSON tree with one to four places changed; pairs of an object stand as a list in a `dict`'s place."""
    for _ in range(rng.choice((1, 1, 1, 2, MAX_CHANGES))):
        tree = _change(rng, tree)
    return tree


def mutate_json(rng: Random, tree: Any) -> bytes:
    """Return the text of a changed tree, and sometimes damaged text."""
    raw = dump(mutate_tree(rng, tree)).encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, raw) if rng.random() < 0.1 else raw


def dump(tree: Any) -> str:
    """Write JSON; `Raw` texts as they are, and objects that hold a key twice (`_Twice`)."""
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, dict):
        pairs = [f"{json.dumps(key)}: {dump(value)}" for key, value in tree.items()]
        if isinstance(tree, _Twice) and pairs:
            pairs.append(pairs[0])
        return "{" + ", ".join(pairs) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(dump, tree)) + "]"
    return json.dumps(tree)


def split_header(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a good safetensors file."""
    end = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    return json.loads(raw[LENGTH_BYTES:end]), raw[end:]


def pack_header(rng: Random, header: Any, data: bytes) -> bytes:
    """Return a safetensors file of a changed header; its length is forged from time to time."""
    raw = dump(header).encode("utf-8", "surrogatepass")
    length = rng.choice(NUMBERS) % 2**64 if rng.random() < 0.1 else len(raw)
    return length.to_bytes(LENGTH_BYTES, "little") + raw + data


class _Twice(dict[str, Any]):
    """An object whose first key is written twice."""


def _change(rng: Random, tree: Any) -> Any:
    """Change one random place of the tree; the deeper ones are as likely as the others."""
    places = list(_places(tree))
    if not places:
        return rng.choice(VALUES)
    path = rng.choice(places)
    return _edit(rng, tree, path)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    if len(path) > 8:
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items)[:200]:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _edit(rng: Random, tree: Any, path: tuple[Any, ...]) -> Any:
    copy: Any = type(tree)(tree)
    key, *rest = path
    if rest:
        copy[key] = _edit(rng, copy[key], tuple(rest))
        return copy
    old = copy[key]
    match rng.randrange(10):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            name = rng.choice((f"{key}x", "", "../x", "\x1b[31m", "a" * 300, str(key).upper(), "\ud800"))
            copy[name] = copy.pop(key)
        case 2 if isinstance(copy, dict):
            return _Twice(copy)
        case 3:
            copy[key] = [old]
        case 4:
            copy[key] = str(old) if rng.random() < 0.5 else {"value": old}
        case 5 if isinstance(old, int) and not isinstance(old, bool):
            copy[key] = rng.choice((old + 1, old - 1, -old, old * 2, old * 2**32, float(old), old + 2**63))
        case 6 if isinstance(old, str):
            copy[key] = old + rng.choice(PIECES)
        case 7 if isinstance(old, list) and old:
            copy[key] = old * rng.choice((0, 2, 1000))
        case _:
            copy[key] = rng.choice(VALUES)
    return copy
