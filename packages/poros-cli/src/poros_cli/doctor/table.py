"""Showing the facts of `poros doctor` to people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poros.units import format_bytes

__all__ = ["show_facts"]


def show_facts(facts: dict[str, Any], console: Console) -> None:
    """Print facts as tables, then notes, then problems."""
    _section(
        console, "Versions", ((name, version or "not there") for name, version in facts["versions"].items())
    )
    _section(console, "Host", _host_rows(facts["host"]))
    _section(console, "Device", _device_rows(facts))
    _section(console, "Plugins", _plugin_rows(facts["plugins"]))
    for note in facts["notes"]:
        console.print(Text(f"Note: {note}"))
    for problem in facts["problems"]:
        console.print(Text(f"Problem: {problem}", style="bold red"))
    if not facts["problems"]:
        console.print(Text("No problems found.", style="bold green"))


def _section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2)
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)
    console.print()


def _host_rows(host: dict[str, Any]) -> list[tuple[str, str]]:
    limit, memlock = host["cgroup_limit_bytes"], host["memlock_limit_bytes"]
    return [
        ("platform", host["platform"]),
        ("CPUs for this process", str(host["cpu_count"])),
        ("WSL", "yes" if host["wsl"] else "no"),
        ("container", host["container"] or "none detected"),
        (
            "RAM",
            f"{format_bytes(host['ram_available_bytes'])} available of {format_bytes(host['ram_total_bytes'])}",
        ),
        (
            "cgroup memory limit",
            "none"
            if limit is None
            else f"{format_bytes(limit)}, {format_bytes(host['cgroup_used_bytes'] or 0)} used",
        ),
        ("usable by a run", format_bytes(host["usable_bytes"])),
        ("ulimit -l (page-locking)", "unlimited" if memlock is None else format_bytes(memlock)),
    ]


def _device_rows(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if not facts["devices"]:
        yield "CUDA devices", "none"
    for device in facts["devices"]:
        memory = f"{format_bytes(device['memory_free_bytes'])} free of {format_bytes(device['memory_total_bytes'])}"
        yield (
            f"cuda:{device['index']}",
            f"{device['name']}, compute capability {device['compute_capability']}, {memory}",
        )
    yield "measured on", facts["device"] or "nothing"
    if link := facts["link"]:
        pinned, pageable = link["pinned_gigabytes_per_second"], link["pageable_gigabytes_per_second"]
        yield "host to device, page-locked", "refused" if pinned is None else f"{pinned:.1f} GB/s"
        yield "host to device, pageable", f"{pageable:.1f} GB/s"
    if pinning := facts["pinning"]:
        yield "can be page-locked", _pinning_words(pinning)
    nf4 = facts["nf4"]
    words = f"works, relative error {nf4['relative_error']:.3f}" if nf4["ok"] else f"FAILS: {nf4['error']}"
    yield f"NF4 round trip on {nf4['device']}", words


def _pinning_words(pinning: dict[str, Any]) -> str:
    amount = format_bytes(pinning["pinned_bytes"])
    return {
        "refused": f"{amount}, then refused: {pinning['message']}",
        "memory": f"at least {amount} (no more was tried: memory is needed elsewhere)",
        "limit": f"at least {amount} (--pin-probe-gib goes further)",
    }[pinning["stopped_by"]]


def _plugin_rows(plugins: list[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    for plugin in plugins:
        registers = ", ".join(plugin["registers"])
        yield (
            f"{plugin['name']} ({plugin['distribution']})",
            plugin["status"] + (f": {registers}" if registers else ""),
        )
