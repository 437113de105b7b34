"""An adapter as the start of a run: read, compared with what the run would make, and put into the bank."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from poros.adapters import ADAPTER, lora_layers
from poros.bank import AdapterBank
from poros.checkpoint.tensor_file import check_finite
from poros.errors import ConfigError, explain
from poros.export.adapter import Adapter, find_adapter
from poros.export.fitting import base_notes, match_layers, stated
from poros.model import MetaModel
from poros.units import ranges

__all__ = ["InitialAdapter", "read_initial_adapter"]

Place = tuple[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialAdapter:
    """Starting weights of every adapted layer.

    Attributes:
        tensors: by (block, path in the block) and group, on the CPU.
        fingerprint: of all their values.
        notes: sentences that the user should see.
    """

    tensors: Mapping[Place, Mapping[str, torch.Tensor]]
    fingerprint: str
    notes: tuple[str, ...]

    def fill(self, bank: AdapterBank) -> None:
        """Write the weights into a bank, in float32."""
        for block, tensor, view in bank.tensors(bank.weights):
            view.copy_(self.tensors[block, tensor.path][tensor.group])


def read_initial_adapter(folder: str, meta: MetaModel, base_fingerprint: str) -> InitialAdapter:
    """Read the adapter that a run starts from. Nothing is adopted from it but its weights.

    Args:
        folder: output of a run, or a folder that PEFT wrote; keys of the text model and of a wrapper are both read.
        meta: the run's injected model.
        base_fingerprint: of the run's weight files.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another base.
        ConfigError: it is more than LoRA, or its layers, ranks, alphas or scaling rule are not those of the run.
        NonFiniteError: a tensor holds NaN or infinity.
    """
    adapter = find_adapter(folder)
    check_finite(adapter.tensors, "The adapter to start from")
    found = match_layers(adapter, meta.architecture.build(meta.config), meta.parts)
    ours = {
        (index, path): layer for index, block in enumerate(meta.blocks) for path, layer in lora_layers(block)
    }
    if ours.keys() != found.keys():
        raise _other_layers(adapter, ours.keys(), found.keys())
    for place, layer in sorted(ours.items()):
        name, sides = found[place]
        rank, alpha = stated(adapter, name, sides)
        rslora = bool(adapter.config.use_rslora)
        wanted = {
            "rank": layer.r[ADAPTER],
            "alpha": layer.lora_alpha[ADAPTER],
            "use_rslora": bool(meta.lora_config.use_rslora),
        }
        got = {"rank": rank, "alpha": alpha, "use_rslora": rslora}
        if differing := [key for key in wanted if wanted[key] != got[key]]:
            raise _mismatch(adapter, place, differing, wanted, got)
    return InitialAdapter(
        tensors={
            place: {f"lora_{side}": tensor for side, tensor in sides.items()}
            for place, (_, sides) in found.items()
        },
        fingerprint=_fingerprint({place: sides for place, (_, sides) in found.items()}),
        notes=(
            f"Training starts from the adapter in {adapter.folder}.",
            *base_notes(adapter, base_fingerprint),
        ),
    )


def _fingerprint(tensors: Mapping[Place, Mapping[str, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for (block, path), sides in sorted(tensors.items()):
        for side, tensor in sorted(sides.items()):
            digest.update(f"{block}/{path}/{side}/{list(tensor.shape)}".encode())
            digest.update(tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _other_layers(adapter: Adapter, ours: Collection[Place], theirs: Collection[Place]) -> ConfigError:
    block, path = min(set(ours) ^ set(theirs))
    return ConfigError(
        explain(
            "The adapter to start from adapts other layers than this run",
            expected=_layers(ours),
            got=_layers(theirs),
            where=f"lora.init_from: {adapter.folder}; block {block}, `{path}` for example",
            next_step="Give its layers in `lora.targets` and `lora.blocks`",
        )
    )


def _layers(places: Collection[Place]) -> str:
    leaves = sorted({path.rpartition(".")[2] for _, path in places})
    return f"{', '.join(leaves)} in blocks {ranges(sorted({block for block, _ in places}))}"


def _mismatch(
    adapter: Adapter,
    place: Place,
    differing: Collection[str],
    wanted: Mapping[str, float],
    got: Mapping[str, float],
) -> ConfigError:
    block, path = place
    return ConfigError(
        explain(
            "The adapter to start from is of another kind than this run's",
            expected=", ".join(f"{key} {wanted[key]}" for key in differing),
            got=", ".join(f"{key} {got[key]}" for key in differing),
            where=f"lora.init_from: {adapter.folder}; block {block}, `{path}`",
            next_step="Give its values ("
            + ", ".join(f"`lora.{key}: {str(got[key]).lower()}`" for key in differing)
            + "), or leave `lora.init_from` out",
        )
    )
