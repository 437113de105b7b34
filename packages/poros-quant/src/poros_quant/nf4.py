"""NF4 with double quantization through bitsandbytes, on tensors that live in a block's buffer.

Source: Dettmers et al. 2023, QLoRA, section 3 (arXiv:2305.14314).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import ClassVar

import torch

from poros.blocks.frozen_linear import FrozenLinear
from poros.errors import FormatError, explain
from poros.interfaces import TensorSpec, WeightFormat

__all__ = ["Nf4"]

BLOCKSIZE = 64
ABSMAX_BLOCKSIZE = 256
NUM_CODES = 16
NUM_ABSMAX_CODES = 256
# A sample that has every code and magnitude many times.
SAMPLE_ROWS, SAMPLE_COLUMNS = 256, 512
MAX_CAUSE = 200
ENCODABLE = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _bitsandbytes() -> ModuleType:
    """Import bitsandbytes on first use: it loads torch's compiler, seconds that `poros --help` need not wait for."""
    try:
        import bitsandbytes
    except Exception as error:  # a binary that does not fit this machine fails in any way
        raise FormatError(
            explain(
                "Cannot use `nf4`",
                expected="a working bitsandbytes",
                got=f"{type(error).__name__}: {error}",
                next_step="Run `poros doctor`; `quantization: bf16_bitwise` works without it",
            )
        ) from error
    return bitsandbytes


@functools.cache
def _one_kernel(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return the kernel that does bitsandbytes' three launches in one, where it gives bitsandbytes' bits.

    That is tried on every code and magnitude when it is first asked for. Without it everything is slower and the same.
    """
    try:
        from poros_quant.nf4_kernel import dequantize_nf4
    except ImportError:  # Triton comes with torch on Linux
        return None
    generator = torch.Generator().manual_seed(0)
    tried = Nf4Linear(SAMPLE_COLUMNS, SAMPLE_ROWS, bias=False, compute_dtype=dtype)
    # Whatever the process's default device and dtype are.
    size = (SAMPLE_ROWS, SAMPLE_COLUMNS)
    weight = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    stored = Nf4().encode(weight.to(device))
    for name in ("codes", "absmax"):
        shape = stored[name].shape
        any_byte = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cpu")
        stored[name] = any_byte.to(device)
    tried.bind_weight(stored)
    out = torch.empty(size, dtype=dtype, device=device)
    try:
        tried._with(dequantize_nf4, out)
        same = torch.equal(out.view(torch.uint8), tried._with_bitsandbytes(None).view(torch.uint8))
        cause = "it gives other bits here"
    except Exception as error:  # a compiler that is missing or does not fit fails in any way
        same, cause = False, " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CAUSE]
    if not same:
        warnings.warn(
            f"NF4 is dequantized by bitsandbytes' own kernels: slower, the same bits. Ours cannot be used: {cause}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return dequantize_nf4


@contextlib.contextmanager
def _float32_by_default() -> Iterator[None]:
    """Let bitsandbytes make its code book in float32: in another default dtype it would be rounded.

    Its own kernels would not show that, they have the values built in; whoever reads the book gets other bits.
    """
    before = torch.get_default_dtype()
    if before == torch.float32:  # the setting belongs to all threads: it is left alone where that is possible
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Nf4Linear(FrozenLinear):
    """A linear layer over NF4 codes, absmax codes, nested absmax, offset and both code books."""

    def bind_weight(self, views: Mapping[str, torch.Tensor]) -> None:
        """Build bitsandbytes' quantization state over ``views``; nothing is moved or copied."""
        bnb = _bitsandbytes().functional
        self._codes = views["codes"]
        nested = bnb.QuantState(
            absmax=views["nested_absmax"],
            code=views["absmax_code"],
            blocksize=ABSMAX_BLOCKSIZE,
            dtype=torch.float32,
        )
        self._state = bnb.QuantState(
            absmax=views["absmax"],
            shape=torch.Size((self.out_features * self.in_features,)),
            dtype=self.compute_dtype,
            blocksize=BLOCKSIZE,
            code=views["code"],
            quant_type="nf4",
            offset=views["offset"],
            state2=nested,
        )

    def stored_tensors(self) -> list[torch.Tensor]:
        """See `FrozenLinear.stored_tensors`."""
        state = self._state
        return [self._codes, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]

    def dequantize(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the (O, I) weight in ``compute_dtype``.

        The matrix is dequantized as one flat vector: quantization blocks run across rows, and the CPU kernel of
        bitsandbytes assumes an even number of columns.

        Numerics: bitwise deterministic per device. Memory: one float32 absmax vector, and O * I elements unless
        ``out`` is given.
        """
        if self._codes.is_cuda and self.in_features * self.out_features % BLOCKSIZE == 0:
            kernel = _one_kernel(self._codes.device, self.compute_dtype)
            if kernel is not None:
                if out is None:
                    size = (self.out_features, self.in_features)
                    out = torch.empty(size, dtype=self.compute_dtype, device=self._codes.device)
                self._with(kernel, out)
                return out
        return self._with_bitsandbytes(out)

    def _with(self, kernel: Callable[..., None], out: torch.Tensor) -> None:
        state = self._state
        kernel(
            self._codes,
            state.absmax,
            state.state2.absmax,
            state.offset,
            state.code,
            state.state2.code,
            out.view(-1),
            blocksize=BLOCKSIZE,
            absmax_blocksize=ABSMAX_BLOCKSIZE,
        )

    def _with_bitsandbytes(self, out: torch.Tensor | None) -> torch.Tensor:
        bnb = _bitsandbytes().functional
        if out is None:
            return bnb.dequantize_4bit(self._codes, self._state).view(self.out_features, self.in_features)
        if out.is_cuda:
            bnb.dequantize_4bit(self._codes, self._state, out=out.view(-1))
        else:  # bitsandbytes registers the out variant for CUDA only
            out.copy_(bnb.dequantize_4bit(self._codes, self._state).view_as(out))
        return out


class Nf4(WeightFormat):
    """4-bit NormalFloat, quantization blocks of 64, absmax quantized again in blocks of 256."""

    name: ClassVar[str] = "nf4"
    claims_bitwise: ClassVar[bool] = True
    experimental: ClassVar[bool] = False

    def specs(self, out_features: int, in_features: int) -> tuple[TensorSpec, ...]:
        """Return the six tensors of one weight; see `WeightFormat.specs`."""
        count = out_features * in_features
        num_blocks = _ceil_div(count, BLOCKSIZE)
        return (
            TensorSpec(name="codes", dtype=torch.uint8, shape=(_ceil_div(count, 2), 1)),
            TensorSpec(name="absmax", dtype=torch.uint8, shape=(num_blocks,)),
            TensorSpec(
                name="nested_absmax", dtype=torch.float32, shape=(_ceil_div(num_blocks, ABSMAX_BLOCKSIZE),)
            ),
            TensorSpec(name="offset", dtype=torch.float32, shape=()),
            TensorSpec(name="code", dtype=torch.float32, shape=(NUM_CODES,)),
            TensorSpec(name="absmax_code", dtype=torch.float32, shape=(NUM_ABSMAX_CODES,)),
        )

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize a (O, I) weight on its device with bitsandbytes' own kernels.

        Raises:
            FormatError: the weight is not a 16- or 32-bit float.
        """
        if weight.dtype not in ENCODABLE:
            raise FormatError(
                explain(
                    "Cannot quantize to `nf4`",
                    expected=f"a weight in one of {[str(d) for d in ENCODABLE]}",
                    got=weight.dtype,
                    next_step="Use a checkpoint in bfloat16, float16 or float32",
                )
            )
        with _float32_by_default():
            codes, state = _bitsandbytes().functional.quantize_4bit(
                weight.contiguous().view(-1), blocksize=BLOCKSIZE, compress_statistics=True, quant_type="nf4"
            )
        return {
            "codes": codes,
            "absmax": state.absmax,
            "nested_absmax": state.state2.absmax,
            "offset": state.offset,
            "code": state.code,
            "absmax_code": state.state2.code,
        }

    def linear(
        self, in_features: int, out_features: int, *, bias: bool, compute_dtype: torch.dtype
    ) -> FrozenLinear:
        """Return an unbound NF4 linear layer."""
        return Nf4Linear(in_features, out_features, bias=bias, compute_dtype=compute_dtype)

    def fingerprint(self) -> str:
        """Return the format's name, its block sizes and the bitsandbytes version."""
        return f"nf4-{BLOCKSIZE}-{ABSMAX_BLOCKSIZE}-bitsandbytes-{_bitsandbytes().__version__}"
