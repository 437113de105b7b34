"""Random weights at a config's shapes, drawn without temporaries of a table's size."""

from __future__ import annotations

import torch

from poros.model import MetaModel
from poros.parity.random_model import RandomSource, zero_centred_norms

__all__ = ["BenchSource", "bench_source"]

# A vocabulary table of a large model would need more device memory to be drawn than a small plan has for everything.
SLICE_ELEMENTS = 1 << 26


class BenchSource(RandomSource):
    """A `RandomSource` that draws large matrices slice by slice, each from a name of its own."""

    def load(self, name: str, device: torch.device) -> torch.Tensor:
        """See `RandomSource.load`; beyond the tensor itself only a slice is alive."""
        shape = self._shapes[name]
        if torch.Size(shape).numel() <= SLICE_ELEMENTS or len(shape) != 2:
            return super().load(name, device)
        whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
        rows = max(1, SLICE_ELEMENTS // shape[1])
        for index, part in enumerate(whole.split(rows)):
            slice_name = f"{name}[{index}]"
            self._shapes[slice_name] = tuple(part.shape)
            part.copy_(super().load(slice_name, device))
            del self._shapes[slice_name]
        return whole


def bench_source(meta: MetaModel, seed: int, device: torch.device) -> BenchSource:
    """Return random weights for every tensor of ``meta``."""
    module = meta.architecture.build(meta.config)
    plain = module.state_dict()
    shapes = {name: tuple(plain[name].shape) for name in meta.tensor_names}
    return BenchSource(shapes, seed, device, zero_centred_norms(module))
