"""Limits on host memory, read from faked file systems."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from poros.run.memory import PROCESS_RESERVE_BYTES
from poros_cli.doctor.host import host_facts, in_container, in_wsl, memlock_limit_bytes
from poros_cli.doctor.versions import driver_version, versions


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return tmp_path


def write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def test_usable_memory_is_what_the_cgroup_leaves_above_the_reserve(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/")
    write(root, "sys/fs/cgroup/memory.max", 2**20 + PROCESS_RESERVE_BYTES)
    write(root, "sys/fs/cgroup/memory.current", 2**19)
    assert host_facts(root)["usable_bytes"] == 2**19


def test_usable_memory_without_limit_is_what_is_available(root: Path) -> None:
    facts = host_facts(root)
    assert 0 < facts["usable_bytes"] <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("proc/1/cgroup", "0::/kubepods/pod1", "kubepods"),
        ("proc/1/cgroup", "0::/system.slice/containerd.service", "containerd"),
        ("proc/1/cgroup", "0::/init.scope", None),
    ],
)
def test_container_is_detected(path: str, text: str, kind: str | None, root: Path) -> None:
    write(root, path, text)
    assert in_container(root) == kind


@pytest.mark.parametrize(
    ("release", "expected"), [("5.15.90.1-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)]
)
def test_wsl_is_detected(release: str, expected: bool) -> None:
    assert in_wsl(release) is expected


@pytest.mark.parametrize(("soft", "expected"), [(65536, 65536), (resource.RLIM_INFINITY, None)])
def test_page_locking_limit(soft: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert memlock_limit_bytes() == expected


def test_driver_version_is_read_from_proc(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0"
    write(tmp_path, "version", text)
    assert driver_version(tmp_path / "version") == "580.95.05"


def test_driver_version_without_driver_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version(tmp_path / "absent") is None


def test_driver_version_is_asked_of_nvidia_smi_where_proc_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 581.42.01\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert driver_version(tmp_path / "absent") == "581.42.01"


def test_versions_name_what_can_change_bits() -> None:
    found = versions()
    assert {"python", "torch", "torch_cuda", "transformers", "peft", "bitsandbytes", "nvidia_driver"} <= set(
        found
    )
    assert found["poros-core"] is not None
