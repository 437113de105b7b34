"""The clause about adapters: what Poros saves, stock PEFT reads, and it has an effect there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from poros.checkpoint import save_adapter, verify_adapter
from poros.errors import CheckpointError
from poros.parity.case_run import start_case
from poros.parity.gates import Oracles
from poros.testing.subject import CPU, Subject, broken
from poros.testing.training import STREAMED

__all__ = ["check_adapter"]


def check_adapter(subject: Subject, _: Oracles) -> None:
    """A trained adapter is saved and reloaded by stock PEFT with 0 missing and 0 unexpected keys."""
    from transformers import AutoModelForCausalLM

    run = start_case(subject.case, STREAMED, subject.registry, CPU)
    try:
        run.train(1)
        tensors = {name: tensor.clone() for name, tensor in run.model.adapter_tensors().items()}
        lora_config = run.model.meta.lora_config
    finally:
        run.close()

    def base() -> torch.nn.Module:
        with torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(subject.text_config)
        return model

    with tempfile.TemporaryDirectory() as folder:
        saved = save_adapter(Path(folder) / "adapter", tensors, lora_config, "tiny")
        try:
            report = verify_adapter(saved, base)
        except CheckpointError as error:
            raise broken(
                "Stock PEFT does not read the adapter",
                expected="0 missing and 0 unexpected keys",
                got=str(error).replace(folder, ""),
                where="saved by Poros, loaded onto `AutoModelForCausalLM` of the text config",
            ) from error
    if report.num_tensors != len(tensors):
        raise broken("The saved adapter is incomplete", expected=len(tensors), got=report.num_tensors)
