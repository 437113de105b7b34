"""Write the short form of validation/receipts into every architecture package: `uv run python tools/ship_receipts.py`.

``receipts.json`` is package data, so that `poros check` can say what stands behind an architecture where the repository
is not at hand. Nobody edits it; a test compares it with what this script makes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from poros.evidence import RECEIPTS_FILE
from poros.plugins import Registry, load_registry

ROOT = Path(__file__).resolve().parents[1]
RECEIPTS = ROOT / "validation" / "receipts"


def packages() -> list[str]:
    """Return the import names of this workspace's architecture packages."""
    return sorted(path.parent.name for path in ROOT.glob("packages/poros-arch-*/src/*/plugin.py"))


def target(package: str) -> Path:
    """Return where a package's file lies."""
    (folder,) = ROOT.glob(f"packages/*/src/{package}")
    return folder / RECEIPTS_FILE


def content(package: str) -> str:
    """Return what a package's file must hold: per architecture, its receipts by name."""
    registry = load_registry()
    found: dict[str, list[dict[str, Any]]] = {}
    for architecture, receipt in [*_residency(package, registry), *_reference(package, registry)]:
        found.setdefault(architecture, []).append(receipt)
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def _residency(package: str, registry: Registry) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (architecture, receipt) of every gate at a real shape that passed."""
    if importlib.util.find_spec(f"{package}.real_shapes") is None:
        return
    real_config = importlib.import_module(f"{package}.real_shapes").real_config
    for path in sorted(RECEIPTS.glob("residency-*.json")):
        receipt = json.loads(path.read_text())
        try:
            config = real_config(receipt["shape"])
        except KeyError:  # a shape of another package
            continue
        registered = registry.architecture_for(config.model_type) if receipt["passed"] else None
        if registered is not None:
            depth = "" if receipt["full_depth"] else f", {receipt['num_blocks']} blocks"
            subject = f"{receipt['shape']}{depth}"
            yield registered.value.name, _short(path, receipt, subject, receipt["weight_format"])


def _reference(package: str, registry: Registry) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (architecture, receipt) of every parity case that was held against the unpatched loop."""
    cases = registry.parity_cases()
    for path in sorted(RECEIPTS.glob("reference-*.json")):
        receipt = json.loads(path.read_text())
        for name in sorted(receipt["results"]):
            case = cases[name].value if name in cases else None
            if case is None:
                continue
            architecture = registry.architectures[case.architecture].value
            if architecture.__module__.partition(".")[0] == package:
                yield architecture.name, _short(path, receipt, name, case.weight_format)


def _short(path: Path, receipt: Mapping[str, Any], subject: str, weight_format: str) -> dict[str, Any]:
    environment = receipt["environment"]
    return {
        "name": path.stem,
        "claim": receipt["claim"],
        "subject": subject,
        "weight_format": weight_format,
        "device_name": environment["device_name"],
        "torch": environment["versions"]["torch"].partition("+")[0],
        "transformers": environment["versions"]["transformers"],
        "commit": environment["commit"],
    }


if __name__ == "__main__":
    for package_name in packages():
        target(package_name).write_text(content(package_name))
