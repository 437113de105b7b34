"""One device, chosen explicitly or refused."""

from __future__ import annotations

import pytest
import torch

from poros.errors import DeviceError, UserError
from poros.run.device import describe_device, refuse_many_processes, resolve_device, slow_arithmetic_notes


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_falls_to_the_cpu() -> None:
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "expected"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_cuda_devices_carry_their_index(name: str, expected: str) -> None:
    assert str(resolve_device(name)) == expected


@pytest.mark.usefixtures("two_gpus")
def test_device_is_named_with_its_index() -> None:
    assert describe_device(torch.device("cuda:1")) == "Card (cuda:1)"
    assert describe_device(torch.device("cpu")) == "CPU"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_without_a_device_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=f"`{name}`: expected a CUDA device, got none .*`--device cpu`"):
        resolve_device(name)


@pytest.mark.usefixtures("two_gpus")
def test_index_out_of_range_is_refused() -> None:
    with pytest.raises(DeviceError, match="`cuda:2`: expected an index below 2, got 2"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}])
def test_one_process_is_fine(environment: dict[str, str]) -> None:
    refuse_many_processes(environment)


@pytest.mark.parametrize("world_size", ["2", "16", "many"])
def test_many_processes_are_refused_in_one_sentence(world_size: str) -> None:
    with pytest.raises(UserError, match=f"`WORLD_SIZE` is {world_size}") as error:
        refuse_many_processes({"WORLD_SIZE": world_size})
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize(
    ("capability", "dtype", "told"),
    [
        ("AVX2", torch.bfloat16, True),
        ("AVX512", torch.bfloat16, False),
        ("AVX2", torch.float32, False),
    ],
)
def test_bfloat16_on_a_cpu_that_emulates_it_is_told(
    capability: str, dtype: torch.dtype, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    notes = slow_arithmetic_notes(torch.device("cpu"), dtype)
    assert bool(notes) == told
    assert all("numerics.compute_dtype: float32" in note for note in notes)
