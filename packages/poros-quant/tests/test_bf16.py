"""bf16_bitwise: the file's own bytes, and nothing that would have to be rounded to become them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from poros.blocks.frozen_linear import FrozenLinear
from poros.errors import FormatError
from poros_quant import Bf16Bitwise

WEIGHT = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).bfloat16()


def bound(compute_dtype: torch.dtype) -> FrozenLinear:
    layer = Bf16Bitwise().linear(7, 5, bias=False, compute_dtype=compute_dtype)
    layer.bind(Bf16Bitwise().encode(WEIGHT.clone()))
    return layer


def test_the_stored_bytes_are_the_file_s() -> None:
    (spec,) = Bf16Bitwise().specs(5, 7)
    (name, stored), *rest = Bf16Bitwise().encode(WEIGHT).items()
    assert not rest
    assert (spec.name, spec.dtype, spec.shape) == (name, torch.bfloat16, (5, 7))
    assert torch.equal(stored.view(torch.int16), WEIGHT.view(torch.int16))


def test_in_bfloat16_the_matrix_is_the_stored_tensor_itself() -> None:
    layer = bound(torch.bfloat16)
    assert not layer.needs_dequantize
    assert layer.matrix().data_ptr() == layer.stored_tensors()[0].data_ptr()


def test_in_float32_the_matrix_is_the_exact_widening() -> None:
    layer = bound(torch.float32)
    assert layer.needs_dequantize
    assert torch.equal(layer.dequantize(), WEIGHT.float())
    assert torch.equal(layer.dequantize(out=torch.empty(5, 7)), WEIGHT.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_and_gradient_are_those_of_the_matrix(dtype: torch.dtype) -> None:
    layer = bound(dtype)
    x = torch.randn(3, 7).to(dtype).requires_grad_()
    grad = torch.randn(3, 5).to(dtype)
    output = layer(x)
    assert torch.equal(output, F.linear(x, WEIGHT.to(dtype)))
    assert torch.equal(torch.autograd.grad(output, x, grad)[0], grad @ WEIGHT.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_that_would_be_rounded_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        FormatError, match=rf"expected torch.bfloat16 in the checkpoint, got {dtype}"
    ) as caught:
        Bf16Bitwise().encode(WEIGHT.to(dtype))
    assert "`quantization: nf4`" in str(caught.value)


def test_the_claims_of_the_format() -> None:
    assert (Bf16Bitwise.name, Bf16Bitwise.claims_bitwise, Bf16Bitwise.experimental) == (
        "bf16_bitwise",
        True,
        True,
    )
