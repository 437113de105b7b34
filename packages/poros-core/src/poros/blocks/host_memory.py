"""Exact-size anonymous host memory, page-locked where the system allows it."""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref

import torch

from poros.blocks import cudart
from poros.blocks.layout import align

__all__ = ["HostArena"]


def _anonymous_memory(num_bytes: int, *, huge_pages: bool) -> mmap.mmap:
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return mmap.mmap(-1, num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux
        # A forked data worker that touched registered pages would get copies of them, or crash.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _unlock(memory: torch.Tensor, starts: list[int], pinned: list[bool]) -> None:
    if any(pinned):
        torch.cuda.synchronize()
    for index, start in enumerate(starts):
        if pinned[index]:
            cudart.unregister_host_memory(memory.data_ptr() + start)
            pinned[index] = False


class HostArena:
    """One anonymous mapping cut into page-aligned regions, each of which may be page-locked by itself.

    ``torch``'s own pinned allocator rounds every request up to a power of two and wastes up to half of it; a mapping
    registered with ``cudaHostRegister`` costs exactly its size.

    Attributes:
        pinned: per region, whether it is page-locked.
    """

    def __init__(self, region_bytes: list[int], *, pin: bool, huge_pages: bool = False) -> None:
        """Map the regions and, with ``pin``, page-lock as many as the system allows, in order.

        Args:
            region_bytes: payload bytes of every region.
            pin: page-lock on a machine with CUDA. When the system refuses, one warning names how far it came and the
                rest stays pageable.
            huge_pages: ask the system for them. A disk that is read past the page cache then writes long stretches
                (small pages that lay scattered: less than half as fast, `validation/receipts/disk-pages.json`).
        """
        self._sizes = region_bytes
        self._starts = []
        total = 0
        for size in region_bytes:
            self._starts.append(total)
            total += align(size, mmap.PAGESIZE)
        self._mapping = _anonymous_memory(max(total, mmap.PAGESIZE), huge_pages=huge_pages)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.total_bytes = total
        self.pinned = [False] * len(region_bytes)
        # Memory that is unmapped while locked would refuse the next lock at its address.
        unlock = weakref.finalize(self, _unlock, self._bytes, self._starts, self.pinned)
        unlock.atexit = False  # the process takes its locks with it
        if pin:
            self._pin()

    def _pin(self) -> None:
        for index, (start, size) in enumerate(zip(self._starts, self._sizes, strict=True)):
            length = align(size, mmap.PAGESIZE)
            code = cudart.register_host_memory(self._bytes.data_ptr() + start, length)
            if code != cudart.CUDA_SUCCESS:
                warnings.warn(
                    f"Page-locking host memory stopped after {start / 2**30:.2f} of {self.total_bytes / 2**30:.2f} "
                    f"GiB (cudaHostRegister returned {code}). This is a limit on page-locked memory (ulimit -l, WSL "
                    "or the container), not on GPU memory. Copies from and to the rest are slower; the bits are "
                    "the same.",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return
            self.pinned[index] = True

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are page-locked, page rounding included."""
        return sum(
            align(size, mmap.PAGESIZE)
            for size, pinned in zip(self._sizes, self.pinned, strict=True)
            if pinned
        )

    def region(self, index: int) -> torch.Tensor:
        """Return region ``index`` as a uint8 vector of its payload size. A view, no copy."""
        start = self._starts[index]
        return self._bytes[start : start + self._sizes[index]]

    def close(self) -> None:
        """Unlock every region. The memory itself goes when the last view does."""
        _unlock(self._bytes, self._starts, self.pinned)
