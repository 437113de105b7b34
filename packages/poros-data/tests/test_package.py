"""The package stands alone: data knows nothing of blocks."""

from __future__ import annotations

import ast
from pathlib import Path

import poros_data


def test_no_module_imports_another_package_of_poros():
    for path in Path(poros_data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith("poros") or name.split(".")[0] == "poros_data", (path.name, name)
