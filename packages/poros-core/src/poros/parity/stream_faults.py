"""Unfavourable timing on a GPU's streams, each alone and together with the missing wait that it would expose.

A correct engine waits, so a delay alone may change nothing. The same delay over an engine that leaves one wait out must
show: otherwise the delay is too short to prove anything.
"""

from __future__ import annotations

import torch

from poros.blocks.slots import CudaSlots, HostSlots
from poros.blocks.store import BlockStore
from poros.parity.faults import DELAY_CYCLES, UNWAITED_DELAY_CYCLES, EngineMaker, with_slots

__all__ = ["delayed_compute", "early_overwrite", "foreign_traffic", "unwaited_behind_traffic"]

# A copy of one buffer takes about 0.3 ms on a PCIe 5 link, so that a burst takes about 5 ms, or 150 ms where nobody
# waits for its end: as long as the delays of `poros.parity.faults`.
TRAFFIC_BYTES = 16 * 2**20
TRAFFIC_COPIES = 16
UNWAITED_TRAFFIC_COPIES = 512


class DelayedComputeSlots(CudaSlots):
    """Every visit starts late: the compute stream sleeps once the block is there."""

    cycles = DELAY_CYCLES

    def acquire(self, slot: int) -> None:
        super().acquire(slot)
        torch.cuda._sleep(self.cycles)


class EarlyOverwriteSlots(DelayedComputeSlots):
    """Visits start late, and copies into a slot do not wait for its last reader."""

    cycles = UNWAITED_DELAY_CYCLES

    def release(self, slot: int) -> None:
        pass


class TrafficSlots(CudaSlots):
    """Foreign copies fill the link in both directions before every copy of a block, which starts after them.

    Attributes:
        traffic_bytes: what they moved, both directions.
    """

    copies = TRAFFIC_COPIES

    def __init__(self, store: BlockStore, num_slots: int, device: torch.device) -> None:
        super().__init__(store, num_slots, device)
        self.traffic_bytes = 0
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._host = [torch.zeros(TRAFFIC_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._there = [torch.zeros(TRAFFIC_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        for stream in self._streams:  # the zeros were written on the compute stream
            stream.wait_stream(torch.cuda.current_stream(device))

    def _copy(self, block: int, source: torch.Tensor, slot: int) -> None:
        inwards, outwards = self._streams
        for _ in range(self.copies):
            with torch.cuda.stream(inwards):
                self._there[0].copy_(self._host[0], non_blocking=True)
            with torch.cuda.stream(outwards):
                self._host[1].copy_(self._there[1], non_blocking=True)
            self.traffic_bytes += 2 * TRAFFIC_BYTES
        self.copy_stream.wait_stream(inwards)
        super()._copy(block, source, slot)

    def drain(self) -> None:
        super().drain()
        for stream in self._streams:
            stream.synchronize()


class UnwaitedTrafficSlots(TrafficSlots):
    """More foreign copies than a visit takes, and the compute stream does not wait for the block behind them."""

    copies = UNWAITED_TRAFFIC_COPIES

    def acquire(self, slot: int) -> None:
        pass


delayed_compute: EngineMaker = with_slots(HostSlots, DelayedComputeSlots)
early_overwrite: EngineMaker = with_slots(HostSlots, EarlyOverwriteSlots)
foreign_traffic: EngineMaker = with_slots(HostSlots, TrafficSlots)
unwaited_behind_traffic: EngineMaker = with_slots(HostSlots, UnwaitedTrafficSlots)
