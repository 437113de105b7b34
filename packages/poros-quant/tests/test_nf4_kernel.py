"""One kernel in place of bitsandbytes' three, only where it gives the same bits.

Without a GPU the kernel runs in Triton's interpreter, which rounds to bfloat16 in another way than any device: there
it is compared in float32 and float16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from poros_quant import nf4
from poros_quant.nf4 import Nf4, Nf4Linear

pytest.importorskip("triton", reason="comes with torch on Linux; without it bitsandbytes' kernels are used")
from poros_quant import nf4_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What was tried in one test is tried again in the next."""
    nf4._one_kernel.cache_clear()
    yield
    nf4._one_kernel.cache_clear()


def make_layer(rows: int, columns: int, dtype: torch.dtype, device: torch.device = DEVICE) -> Nf4Linear:
    generator = torch.Generator().manual_seed(rows)
    layer = Nf4Linear(columns, rows, bias=False, compute_dtype=dtype)
    layer.bind_weight(Nf4().encode(torch.randn(rows, columns, generator=generator).to(device)))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (130, 192), (257, 128)], ids=str)
def test_every_element_is_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = make_layer(*shape, dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    layer._with(nf4_kernel.dequantize_nf4, out)
    assert torch.equal(out, layer._with_bitsandbytes(None))


def test_the_kernel_is_used_where_it_gives_the_same_bits() -> None:
    assert nf4._one_kernel(DEVICE, torch.float32) is nf4_kernel.dequantize_nf4


@pytest.mark.parametrize("column", [0, 511])
def test_a_kernel_with_one_other_bit_is_not_used_and_said(
    column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    dequantize = nf4_kernel.dequantize_nf4

    def other_bit(*arguments: Any, **options: Any) -> None:
        dequantize(*arguments, **options)
        arguments[-1][column].nextafter_(torch.tensor(torch.inf, device=arguments[-1].device))

    monkeypatch.setattr(nf4_kernel, "dequantize_nf4", other_bit)
    with pytest.warns(RuntimeWarning, match="it gives other bits here"):
        assert nf4._one_kernel(DEVICE, torch.float32) is None


def test_a_kernel_that_cannot_be_compiled_is_not_used_and_its_cause_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_compiler(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(nf4_kernel, "dequantize_nf4", no_compiler)
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        assert nf4._one_kernel(DEVICE, torch.float32) is None


def test_without_triton_bitsandbytes_is_used_and_nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "poros_quant.nf4_kernel", None)
    assert nf4._one_kernel(DEVICE, torch.float32) is None


def test_trying_it_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    nf4._one_kernel(DEVICE, torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_trying_it_needs_no_default_device() -> None:
    with torch.device("meta"):
        assert nf4._one_kernel(DEVICE, torch.float32) is nf4_kernel.dequantize_nf4


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_neither_what_is_stored_nor_what_is_tried(default: torch.dtype) -> None:
    """The kernel reads the code book; bitsandbytes has the values built in, and would make a rounded book."""
    weight = torch.randn(64, 64)
    expected = Nf4().encode(weight)
    torch.set_default_dtype(default)
    try:
        found = Nf4().encode(weight)
        kernel = nf4._one_kernel(DEVICE, torch.float32)
        assert torch.get_default_dtype() == default
    finally:
        torch.set_default_dtype(torch.float32)
    assert kernel is nf4_kernel.dequantize_nf4
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 3584), (1536, 1536), (5, 7)], ids=str)
def test_on_a_gpu_layers_dequantize_to_bitsandbytes_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """(5, 7) has half a word at its end: that is left to bitsandbytes."""
    layer = make_layer(*shape, dtype)
    assert nf4._one_kernel(DEVICE, dtype) is not None
    expected = layer._with_bitsandbytes(None)
    assert torch.equal(layer.dequantize(), expected)
    out = torch.empty_like(expected)
    assert layer.dequantize(out=out) is out
    assert torch.equal(out, expected)
