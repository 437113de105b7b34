"""Kernels of visits captured once as CUDA graphs and replayed for every block of a kind.

A graph reads and writes only fixed addresses: the template's buffer, the static adapter region, the static hidden
states. Which kernels run, and on what, is the same as without it; only the launches are saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

__all__ = ["GraphCache"]

Kernels = Callable[[], None]

# A bound on the memory of captured graphs. Length buckets keep the number of shapes small; whatever comes after the
# bound is reached runs without a graph, with the same bits.
MAX_GRAPHS = 1024


class GraphCache:
    """Captured kernels by key.

    Args:
        device: where they run; without CUDA nothing is captured.
        enabled: the plan's word.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._device = device
        self._enabled = enabled and device.type == "cuda"
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._warm: dict[Hashable, int] = {}  # family -> the pass that ran it first
        self._pass = 0
        self._said: set[str] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def num_graphs(self) -> int:
        """How many graphs are held."""
        return len(self._graphs)

    def begin_pass(self) -> None:
        """Start a pass over the blocks. What ran as it is in an earlier one may be captured in this one.

        Not within the same: memory that kernels took as they were is given back when the next capture begins, so that
        it never lies beside the graphs' own.
        """
        self._pass += 1

    def prepare(self, key: Hashable, family: Hashable, kernels: Kernels, keep: Any) -> Kernels:
        """Return what runs ``kernels``: themselves, or the replay of their graph.

        In the pass that first meets a family its kernels run as they are: libraries allocate and choose on first use,
        which must not happen inside a capture. In later passes they are captured, which runs nothing, and replayed.

        Args:
            key: what the addresses depend on; the same key always means the same addresses.
            family: what the kind of kernels depends on (block kind, direction, shape).
            kernels: issue work on the current stream, reading and writing fixed addresses only.
            keep: objects whose memory the graph reads.
        """
        if not self._enabled:
            return kernels
        if key in self._graphs:
            return self._graphs[key][0].replay
        if self._warm.setdefault(family, self._pass) == self._pass:
            return kernels
        if len(self._graphs) >= MAX_GRAPHS:
            self._say_once(f"{MAX_GRAPHS} graphs are held; further shapes run without one")
            return kernels
        graph = self._capture(kernels)
        if graph is None:
            return kernels
        self._graphs[key] = graph, keep
        return graph.replay

    def _capture(self, kernels: Kernels) -> torch.cuda.CUDAGraph | None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads and streams (copies, the loader's) go on meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                kernels()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._enabled = False
            self._graphs.clear()  # nothing replays them any more, and their pool is large
            self._pool = None
            reason = str(error).strip().splitlines()[0]
            self._say_once(f"this block cannot be captured ({reason})")
            return None
        # A capture begins by writing the generator's seed where all graphs read it from, on a stream of its own.
        # A replay writes its seed to the same place on this one: it must come second, or dropout draws another mask.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph

    def _say_once(self, reason: str) -> None:
        if reason in self._said:
            return
        self._said.add(reason)
        warnings.warn(
            f"CUDA graphs are not used from here on: {reason}. Steps launch every kernel by itself: slower, the same "
            "bits.",
            RuntimeWarning,
            stacklevel=2,
        )
