"""`poros doctor`: what it finds is measured, and what is broken is a problem in words."""

from __future__ import annotations

import json
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

from poros.blocks import host_memory
from poros.errors import PluginError
from poros.hookspecs import hookimpl
from poros.plugins import load_plugins, load_registry
from poros_cli import main as cli
from poros_cli.doctor import probes
from poros_cli.doctor.facts import collect_facts

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class FakeArena:
    """Page-locks up to ``room`` bytes and then warns, as `poros.blocks.host_memory.HostArena` does."""

    room = 4 * GIB
    closed = 0

    def __init__(self, regions: list[int], *, pin: bool) -> None:
        assert pin
        self.pinned_bytes = 0
        for size in regions:
            if self.pinned_bytes + size > self.room:
                warnings.warn("Page-locking host memory stopped", RuntimeWarning, stacklevel=2)
                return
            self.pinned_bytes += size

    def close(self) -> None:
        FakeArena.closed += 1


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> type[FakeArena]:
    monkeypatch.setattr(host_memory, "HostArena", FakeArena)
    monkeypatch.setattr(FakeArena, "closed", 0)
    return FakeArena


def test_nf4_round_trip_works_on_the_cpu() -> None:
    result = probes.nf4_round_trip(CPU)
    assert result["ok"], result["error"]
    assert 0 < result["relative_error"] <= probes.NF4_MAX_RELATIVE_ERROR


def test_nf4_round_trip_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as bnb

    real = bnb.dequantize_4bit
    monkeypatch.setattr(bnb, "dequantize_4bit", lambda codes, state: -real(codes, state))
    result = probes.nf4_round_trip(CPU)
    assert not result["ok"]
    assert "expected at most" in result["error"]


def test_nf4_round_trip_that_gives_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as bnb

    real = bnb.dequantize_4bit
    monkeypatch.setattr(bnb, "dequantize_4bit", lambda codes, state: real(codes, state) * float("nan"))
    assert not probes.nf4_round_trip(CPU)["ok"]


def test_nf4_round_trip_without_a_kernel_fails_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.functional as bnb

    def missing(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(bnb, "quantize_4bit", missing)
    assert probes.nf4_round_trip(CPU)["error"] == "RuntimeError: no kernel image is available"


def test_nf4_round_trip_without_bitsandbytes_fails_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    assert probes.nf4_round_trip(CPU)["error"].startswith("ModuleNotFoundError: ")


def test_pinning_stops_where_the_system_refuses(arena: type[FakeArena]) -> None:
    result = probes.pinnable(usable_bytes=64 * GIB, limit_bytes=16 * GIB)
    assert result == {
        "pinned_bytes": 4 * GIB,
        "stopped_by": "refused",
        "message": "Page-locking host memory stopped",
    }


def test_pinning_stops_at_its_limit_and_frees_everything(arena: type[FakeArena]) -> None:
    result = probes.pinnable(usable_bytes=64 * GIB, limit_bytes=3 * GIB)
    assert (result["pinned_bytes"], result["stopped_by"], arena.closed) == (3 * GIB, "limit", 1)


def test_pinning_leaves_memory_to_others(arena: type[FakeArena]) -> None:
    result = probes.pinnable(usable_bytes=probes.PIN_RESERVE_BYTES + 2 * GIB, limit_bytes=16 * GIB)
    assert (result["pinned_bytes"], result["stopped_by"]) == (2 * GIB, "memory")


def test_pinning_without_free_memory_tries_nothing(arena: type[FakeArena]) -> None:
    assert probes.pinnable(usable_bytes=GIB, limit_bytes=16 * GIB)["pinned_bytes"] == 0
    assert arena.closed == 0


@pytest.mark.usefixtures("no_gpu")
def test_machine_without_gpu_has_no_problem_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "No CUDA device in use" in out
    assert "No problems found." in out
    assert "NF4 round trip on cpu" in out


@pytest.mark.usefixtures("no_gpu")
def test_json_holds_everything_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["problems"] == []
    assert facts["device"] == "cpu"
    assert facts["nf4"]["ok"] is True
    assert {"versions", "host", "devices", "link", "pinning", "plugins", "notes"} <= set(facts)


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_device_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--device", "cuda"]) == 2
    assert "Cannot use device `cuda`" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_broken_nf4_is_a_problem_with_versions_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"device": "cpu", "ok": False, "relative_error": None, "error": "RuntimeError: no kernel"}
    monkeypatch.setattr(probes, "nf4_round_trip", lambda device: broken)
    (problem,) = collect_facts(load_registry(), "auto", 0)["problems"]
    for word in ("RuntimeError: no kernel", "bitsandbytes", "torch", "compute capability", "bf16_bitwise"):
        assert word in problem


@pytest.mark.usefixtures("no_gpu")
def test_plugins_are_listed_with_what_they_register() -> None:
    plugins = {plugin["name"]: plugin for plugin in collect_facts(load_registry(), "cpu", 0)["plugins"]}
    assert plugins["cli"]["status"] == "loaded"
    assert "command doctor" in plugins["cli"]["registers"]
    assert "format nf4" in plugins["quant"]["registers"]


@pytest.mark.usefixtures("no_gpu")
def test_plugins_left_out_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POROS_PLUGINS", "cli")
    plugins = {plugin["name"]: plugin for plugin in collect_facts(load_registry(), "cpu", 0)["plugins"]}
    assert plugins["quant"]["status"] == "left out by POROS_PLUGINS=cli"


@pytest.mark.usefixtures("no_gpu")
def test_broken_plugin_is_a_problem_beside_everything_else() -> None:
    facts = collect_facts(PluginError("Plugin `x` of distribution `y` failed"), "cpu", 0)
    assert facts["problems"] == ["Plugin `x` of distribution `y` failed"]
    assert {plugin["status"] for plugin in facts["plugins"]} == {"not loaded"}
    assert facts["nf4"]["ok"]


@pytest.mark.usefixtures("no_gpu")
def test_a_hook_that_raises_is_a_problem_beside_everything_else() -> None:
    plugin = ModuleType("x")
    plugin.poros_register_architectures = hookimpl(lambda: 1 / 0)  # type: ignore[attr-defined]
    facts = collect_facts(load_plugins([("x", "dist-x", plugin)]), "cpu", 0)
    (problem,) = facts["problems"]
    assert "`poros_register_architectures` of distribution `dist-x` failed" in problem
    assert facts["nf4"]["ok"]


@pytest.mark.gpu
def test_gpu_link_is_measured() -> None:
    link = probes.link_gigabytes_per_second(torch.device("cuda", 0))
    assert link["pageable_gigabytes_per_second"] > 0
    assert link["pinned_gigabytes_per_second"] > link["pageable_gigabytes_per_second"]


@pytest.mark.gpu
def test_gpu_doctor_finds_no_problem() -> None:
    facts = collect_facts(load_registry(), "cuda", 2 * GIB)
    assert facts["problems"] == []
    assert facts["pinning"]["pinned_bytes"] > 0
