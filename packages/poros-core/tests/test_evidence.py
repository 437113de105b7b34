"""What receipts say of the platform at hand."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from poros.decoder import DecoderArchitecture
from poros.evidence import ShippedReceipt, device_name, platform_status, receipts_of

CPU = torch.device("cpu")
TORCH = torch.__version__.partition("+")[0]


def receipt(device: str, version: str, claim: str = "residency") -> ShippedReceipt:
    return ShippedReceipt(
        name="r",
        claim=claim,
        subject="a shape",
        weight_format="nf4",
        device_name=device,
        torch=version,
        transformers="5.17.0",
        commit="0",
    )


HERE = device_name(CPU)


@pytest.mark.parametrize(
    ("receipts", "text"),
    [
        ((), f"no receipt of this platform ({HERE}, torch {TORCH})"),
        ((receipt("NVIDIA H200", TORCH),), "no receipt of this platform"),
        ((receipt(HERE, TORCH, "reference"),), "no receipt of this platform"),
        ((receipt(HERE, "2.0.0"),), f"on this device with torch 2.0.0, not with torch {TORCH}"),
        ((receipt(HERE, "2.0.0"), receipt(HERE, TORCH)), f"on this very platform ({HERE}, torch {TORCH})"),
    ],
    ids=["none", "another device", "another claim", "another torch", "this one"],
)
def test_only_a_bitwise_receipt_of_this_device_and_torch_speaks_for_it(
    receipts: tuple[ShippedReceipt, ...], text: str
) -> None:
    assert text in platform_status(receipts, CPU)


def test_a_package_without_receipts_has_none() -> None:
    class Mine(DecoderArchitecture):
        name: ClassVar[str] = "mine"
        model_types: ClassVar[tuple[str, ...]] = ("mine",)

    Mine.__module__ = "poros.decoder"
    assert receipts_of(Mine()) == ()
