"""NF4 codes to a matrix in one kernel: bitsandbytes' bits, without its two launches for a float32 copy of the absmax.

A visit dequantizes every matrix of a block, and writing them is what takes the time. Eight codes lie in one 32-bit
word, so that every thread reads four bytes and writes sixteen (in 16 bits), beside its neighbours.

Shape letters: N elements of the matrix, W words of eight codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["CODES_PER_WORD", "dequantize_nf4"]

CODES_PER_WORD = 8
WORDS_PER_PROGRAM = 1024
WARPS = 8


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    words,
    absmax,
    nested_absmax,
    offset,
    code,
    absmax_code,
    out,
    num_words,
    WORDS: tl.constexpr,
    WORDS_PER_BLOCK: tl.constexpr,
    BLOCKS_PER_NESTED: tl.constexpr,
):
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < num_words
    block = word // WORDS_PER_BLOCK
    quantized = tl.load(absmax + block, mask=inside, other=0).to(tl.int32)
    scale = tl.load(absmax_code + quantized) * tl.load(
        nested_absmax + block // BLOCKS_PER_NESTED, mask=inside, other=0.0
    )
    scale = scale + tl.load(offset)
    # The first code of a byte is its upper half, the first byte of a word its lowest.
    place = tl.arange(0, 8)
    shift = (place // 2) * 8 + (1 - place % 2) * 4
    packed = tl.load(words + word, mask=inside, other=0)
    index = (packed[:, None] >> shift[None, :]) & 15
    value = tl.load(code + index) * scale[:, None]
    element = word[:, None].to(tl.int64) * 8 + place[None, :]
    tl.store(out + element, value.to(out.dtype.element_ty), mask=inside[:, None])


def dequantize_nf4(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor,
    offset: torch.Tensor,
    code: torch.Tensor,
    absmax_code: torch.Tensor,
    out: torch.Tensor,
    *,
    blocksize: int,
    absmax_blocksize: int,
) -> None:
    """Write the (N,) elements that ``codes`` stand for to ``out``, in its dtype.

    Args:
        codes: uint8, two per byte, at an address that is a multiple of 4; N must be a multiple of 8.
        absmax: (N / blocksize,) uint8 codes of the blocks' largest magnitudes.
        nested_absmax, offset, absmax_code: what they are made floats with.
        code: (16,) float32 values of the codes.
        out: (N,) contiguous, 16- or 32-bit floats.
        blocksize, absmax_blocksize: elements per absmax, absmax codes per nested one.
    """
    words = codes.view(-1).view(torch.int32)
    grid = (triton.cdiv(words.numel(), WORDS_PER_PROGRAM),)
    with torch.cuda.device_of(codes):
        _dequantize_kernel[grid](
            words,
            absmax,
            nested_absmax,
            offset,
            code,
            absmax_code,
            out,
            words.numel(),
            WORDS=WORDS_PER_PROGRAM,
            WORDS_PER_BLOCK=blocksize // CODES_PER_WORD,
            BLOCKS_PER_NESTED=absmax_blocksize,
            num_warps=WARPS,
            enable_fp_fusion=False,  # bitsandbytes rounds the product before it adds the offset
        )
