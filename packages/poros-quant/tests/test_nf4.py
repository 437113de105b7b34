"""NF4: what is stored, what comes back, and that odd shapes are no exception.

Shape letters: O out features, I in features.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from poros.blocks.frozen_linear import FrozenLinear
from poros.blocks.layout import make_layout
from poros.errors import FormatError
from poros.interfaces import TensorSpec
from poros_quant import Nf4
from poros_quant.nf4 import ABSMAX_BLOCKSIZE, BLOCKSIZE

# Weight counts around the sizes of both kinds of quantization block; odd counts leave half a byte.
SHAPES = [(1, 1), (5, 7), (3, 64), (2, 3), (64, 256), (65, 257), (128, 129), (1, 16385), (130, 130)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])

# Half the widest gap between NF4 codes (0.304 of a block's absmax), plus what nested quantization moves the absmax.
MAX_ERROR_PER_ABSMAX = 0.17


def make_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def bind(
    weight: torch.Tensor, compute_dtype: torch.dtype = torch.float32, bias: torch.Tensor | None = None
) -> tuple[FrozenLinear, torch.Tensor]:
    """Encode ``weight`` into a block's buffer and return a layer that reads it there, and the buffer."""
    nf4, (rows, columns) = Nf4(), weight.shape
    specs = [*nf4.specs(rows, columns)]
    encoded = nf4.encode(weight)
    if bias is not None:
        specs.append(TensorSpec(name="bias", dtype=bias.dtype, shape=tuple(bias.shape)))
        encoded["bias"] = bias
    layout = make_layout(specs)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    for name, tensor in encoded.items():
        views[name].copy_(tensor.view(views[name].shape))
    layer = nf4.linear(columns, rows, bias=bias is not None, compute_dtype=compute_dtype)
    layer.bind(views)
    return layer, buffer


def by_hand(weight: torch.Tensor) -> torch.Tensor:
    """Dequantize in plain torch from the six stored tensors."""
    encoded = Nf4().encode(weight)
    packed = encoded["codes"].view(-1)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: weight.numel()].long()
    absmax = encoded["absmax_code"][encoded["absmax"].long()]
    absmax = absmax * encoded["nested_absmax"].repeat_interleave(ABSMAX_BLOCKSIZE)[: absmax.numel()]
    absmax = absmax + encoded["offset"]
    return (encoded["code"][codes] * absmax.repeat_interleave(BLOCKSIZE)[: codes.numel()]).view(weight.shape)


@dtypes
@shapes
def test_stored_tensors_have_the_stated_names_dtypes_and_sizes(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    encoded = Nf4().encode(make_weight(shape, dtype))
    specs = {spec.name: spec for spec in Nf4().specs(*shape)}
    assert encoded.keys() == specs.keys()
    for name, tensor in encoded.items():
        assert (tensor.dtype, tensor.nbytes) == (specs[name].dtype, specs[name].num_bytes)


@dtypes
@shapes
def test_a_slot_s_bytes_dequantize_as_the_format_defines(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = make_weight(shape, dtype)
    layer, _ = bind(weight)
    assert torch.equal(layer.dequantize(), by_hand(weight))


@shapes
def test_the_error_stays_inside_half_a_code(shape: tuple[int, int]) -> None:
    weight = make_weight(shape)
    layer, _ = bind(weight)
    error = (layer.dequantize() - weight).abs().view(-1)
    for start in range(0, weight.numel(), BLOCKSIZE):
        absmax = weight.view(-1)[start : start + BLOCKSIZE].abs().max()
        assert error[start : start + BLOCKSIZE].max() <= MAX_ERROR_PER_ABSMAX * absmax


@dtypes
def test_dequantizing_to_bfloat16_rounds_the_float32_values(dtype: torch.dtype) -> None:
    weight = make_weight((65, 257), dtype)
    assert torch.equal(bind(weight, torch.bfloat16)[0].dequantize(), by_hand(weight).bfloat16())


@shapes
def test_the_workspace_holds_the_same_bits(shape: tuple[int, int]) -> None:
    layer, _ = bind(make_weight(shape))
    expected = layer.dequantize()
    layer.workspace = torch.full(shape, float("nan"))
    layer.materialize()
    assert torch.equal(layer.workspace, expected)
    assert layer.matrix() is layer.workspace


def test_a_layer_reads_what_its_slot_holds_now() -> None:
    layer, buffer = bind(make_weight((8, 64)))
    other, other_buffer = bind(make_weight((8, 64)) * 3)
    buffer.copy_(other_buffer)
    assert torch.equal(layer.dequantize(), other.dequantize())


def test_every_stored_tensor_lies_in_the_buffer() -> None:
    layer, buffer = bind(make_weight((65, 257)), bias=torch.randn(65))
    bound = layer.bound_tensors()
    assert len(bound) == 7
    assert all(buffer.data_ptr() <= t.data_ptr() < buffer.data_ptr() + buffer.numel() for t in bound)


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_every_row_count_takes_the_one_product_path(rows: int) -> None:
    """bitsandbytes' fused product for few rows rounds differently, and so would a recompute with other shapes."""
    bias = torch.randn(8, dtype=torch.bfloat16)
    layer, _ = bind(make_weight((8, 64)), torch.bfloat16, bias)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x), F.linear(x, layer.dequantize(), bias))


def test_the_gradient_is_that_of_the_dequantized_matrix() -> None:
    layer, _ = bind(make_weight((8, 64)))
    x = torch.randn(3, 64, requires_grad=True)
    grad = torch.randn(3, 8)
    (found,) = torch.autograd.grad(layer(x), x, grad)
    assert torch.equal(found, grad @ layer.dequantize())


def test_training_steps_change_no_stored_bit() -> None:
    layer, buffer = bind(make_weight((65, 257)), bias=torch.randn(65))
    before = buffer.clone()
    for mode in (True, False):
        layer.train(mode)
        layer(torch.randn(2, 257, requires_grad=True)).sum().backward()
    assert torch.equal(buffer, before)


def test_encoding_does_not_change_the_weight() -> None:
    weight = make_weight((65, 257))
    before = weight.clone()
    Nf4().encode(weight)
    assert torch.equal(weight, before)


def test_a_transposed_view_is_encoded_by_value() -> None:
    weight = make_weight((64, 8)).t()
    encoded, expected = Nf4().encode(weight), Nf4().encode(weight.contiguous())
    assert all(torch.equal(encoded[name], expected[name]) for name in expected)


def test_encoding_twice_gives_the_same_bytes() -> None:
    first, second = (Nf4().encode(make_weight((130, 130))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("value", [0.0, 0.5, -2.0])
def test_a_constant_weight_comes_back_exactly(value: float) -> None:
    layer, _ = bind(torch.full((8, 64), value))
    assert layer.dequantize().eq(value).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_a_dtype_that_cannot_be_quantized_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=rf"Cannot quantize to `nf4`: .* got {dtype}"):
        Nf4().encode(torch.ones(8, 64, dtype=dtype))


def test_the_fingerprint_names_block_sizes_and_the_library_s_version() -> None:
    import bitsandbytes

    assert Nf4().fingerprint() == f"nf4-64-256-bitsandbytes-{bitsandbytes.__version__}"


def test_the_claims_of_the_format() -> None:
    assert (Nf4.name, Nf4.claims_bitwise, Nf4.experimental) == ("nf4", True, False)
