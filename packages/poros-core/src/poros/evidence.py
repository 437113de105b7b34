"""The receipts behind a validated architecture, as its package ships them, and what they say of this platform.

``receipts.json`` inside an architecture package is made from the repository's receipts by ``tools/ship_receipts.py``; a
test keeps the two together.
"""

from __future__ import annotations

import importlib.resources
import platform
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from poros.checkpoint.json_files import parse_json
from poros.errors import CheckpointError, PluginError, explain
from poros.interfaces import Architecture

__all__ = [
    "RECEIPTS_FILE",
    "ShippedReceipt",
    "device_name",
    "parse_receipts",
    "platform_status",
    "receipts_of",
]

RECEIPTS_FILE = "receipts.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedReceipt:
    """One receipt in short.

    Attributes:
        name: file name in ``validation/receipts`` of the repository, without its ending.
        claim: ``residency`` (bitwise) or ``reference`` (distance to an unpatched loop).
        subject: the shape or the parity case that was run.
    """

    name: str
    claim: str
    subject: str
    weight_format: str
    device_name: str
    torch: str
    transformers: str
    commit: str


def receipts_of(architecture: Architecture) -> tuple[ShippedReceipt, ...]:
    """Return the receipts that the architecture's package ships for it; none where it ships no file."""
    package = type(architecture).__module__.partition(".")[0]
    file = importlib.resources.files(package).joinpath(RECEIPTS_FILE)
    if not file.is_file():
        return ()
    return parse_receipts(file.read_bytes(), architecture.name, f"{RECEIPTS_FILE} of {package}")


def parse_receipts(raw: bytes, name: str, where: str) -> tuple[ShippedReceipt, ...]:
    """Return the receipts of one architecture in a package's file.

    Raises:
        PluginError: it is not the file that ``tools/ship_receipts.py`` writes.
    """
    try:
        shipped = parse_json(raw, where)
        receipts = tuple(ShippedReceipt(**receipt) for receipt in shipped.get(name, ()))
    except (AttributeError, TypeError, CheckpointError) as error:
        raise PluginError(
            explain("Cannot read receipts", expected="what `poros` ships", got=error, where=where)
        ) from error
    if not all(isinstance(value, str) for receipt in receipts for value in astuple(receipt)):
        raise PluginError(explain("Cannot read receipts", expected="texts", got="other values", where=where))
    return receipts


def device_name(device: torch.device) -> str:
    """Return the name under which receipts know a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def platform_status(receipts: Sequence[ShippedReceipt], device: torch.device) -> str:
    """Say in one sentence whether bitwise equality was measured on this device with this torch."""
    name, version = device_name(device), torch.__version__.partition("+")[0]
    here = f"{name}, torch {version}"
    measured = [r for r in receipts if r.claim == "residency" and r.device_name == name]
    if any(r.torch == version for r in measured):
        return f"bitwise equality was measured on this very platform ({here})"
    if measured:
        others = ", ".join(sorted({r.torch for r in measured}))
        return f"bitwise equality was measured on this device with torch {others}, not with torch {version}"
    return f"no receipt of this platform ({here})"
