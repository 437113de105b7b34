"""Memory limits of control groups, read from faked file systems."""

from __future__ import annotations

from pathlib import Path

from poros.run.control_group import control_group_memory

GIB = 2**30


def write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert control_group_memory(tmp_path) == (None, None)


def test_cgroup_v2_limit_of_the_own_group(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a/b")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.max", 20 * GIB)
    write(tmp_path, "sys/fs/cgroup/a/b/memory.current", 3 * GIB)
    assert control_group_memory(tmp_path) == (20 * GIB, 3 * GIB)


def test_cgroup_v2_tighter_limit_of_an_ancestor_wins(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a/b")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.max", 20 * GIB)
    write(tmp_path, "sys/fs/cgroup/a/memory.max", 10 * GIB)
    write(tmp_path, "sys/fs/cgroup/a/memory.current", 4 * GIB)
    assert control_group_memory(tmp_path) == (10 * GIB, 4 * GIB)


def test_cgroup_v2_limit_at_the_root_of_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/memory.max", 5 * GIB)
    assert control_group_memory(tmp_path) == (5 * GIB, None)


def test_cgroup_v2_without_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "max")
    assert control_group_memory(tmp_path) == (None, None)


def test_cgroup_v1_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,memory:/x\n4:pids:/y")
    write(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", 2 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory/x/memory.usage_in_bytes", GIB)
    assert control_group_memory(tmp_path) == (2 * GIB, GIB)


def test_cgroup_v1_huge_number_means_no_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:memory:/x")
    write(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", 9223372036854771712)
    assert control_group_memory(tmp_path) == (None, None)


def test_pages_of_files_that_can_be_given_back_are_no_use(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory.max", 5 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory.current", 4 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {3 * GIB}\nactive_file 7")
    assert control_group_memory(tmp_path) == (5 * GIB, GIB)


def test_cgroup_v1_names_pages_of_files_otherwise(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", 2 * GIB)
    write(tmp_path, "sys/fs/cgroup/memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}")
    assert control_group_memory(tmp_path) == (2 * GIB, GIB)
