"""The loss of compiled runs on a GPU: one kernel per chunk of logits, against the formula and the eager loss.

Without a GPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from poros.engine.loss import LossHead, eager_terms
from poros.engine.targets import Targets
from poros.errors import UserError

pytest.importorskip("triton", reason="comes with torch on Linux, where compiled blocks on a GPU need it")
from poros.engine import loss_kernel

P, C, D = 7, 300, 16
# Measured 2026-11-30, x86-64 CPU, torch 2.15, Triton 3.9's interpreter: state 2.4e-7 (relative to 1 + the value), loss
# 5.8e-8 (relative), gradient 2.2e-7 (absolute); sums in another order and exponentials of another library.
TOLERANCE = 2e-6
# Measured 2026-12-01, H200, torch 2.11, a soft cap of 30 and up to 16,384 columns: 2.5e-6 of the state, relative.
GPU_TOLERANCE = 1e-5
# Exponentials on either side of a rounding boundary: neighbours in bfloat16. Measured on an H200 with a soft cap: 7 of
# 149,000 values.
BFLOAT16_UNITS = 1


@pytest.fixture
def device() -> str:
    """Where the kernel runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_state(
    device: str = "cpu", dtype: torch.dtype = torch.float32, columns: int = C
) -> list[torch.Tensor]:
    """Return logits, own columns, and a running state that chunks before have left."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(P, columns, generator=generator) * 4).to(dtype)
    own = torch.randint(-columns, columns, (P,), generator=generator).clamp(min=-1)
    assert (own < 0).any()
    assert (own >= 0).any()
    state = [logits, own, *torch.randn(2, P, generator=generator), torch.zeros(P)]
    state[3].abs_()
    state[2][0] = -torch.inf  # before the first chunk
    state[3][0] = 0
    return [tensor.to(device) for tensor in state]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("block", [64, 512])
def test_the_kernel_leaves_the_state_that_eager_operations_leave(
    softcap: float | None,
    training: bool,
    block: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_kernel, "COLUMNS_AT_ONCE", block)
    found, expected = make_state(device), make_state(device)
    weights, decay = loss_kernel.fused_terms(*found, softcap=softcap, training=training)
    expected_weights, expected_decay = eager_terms(*expected, softcap=softcap, training=training)
    compared = [(decay, expected_decay), *zip(found[2:], expected[2:], strict=True)]
    if training:
        compared.append((weights, expected_weights))
    for ours, theirs in compared:
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_position_s_bits_do_not_depend_on_how_many_there_are(device: str) -> None:
    whole = make_state(device)
    alone = [tensor[2:3].clone() for tensor in whole]
    loss_kernel.fused_terms(*whole, softcap=None, training=True)
    loss_kernel.fused_terms(*alone, softcap=None, training=True)
    for tensor, single in zip(whole, alone, strict=True):
        assert torch.equal(tensor[2:3], single)


def test_logits_that_are_no_numbers_reach_the_loss(device: str) -> None:
    state = make_state(device)
    state[0][3, 17] = torch.nan
    state[1][:] = -1
    loss_kernel.fused_terms(*state, softcap=None, training=True)
    assert state[3].isnan().tolist() == [row == 3 for row in range(P)]


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_fused_head_follows_the_formula(softcap: float | None, device: str) -> None:
    loss, gradient, expected_loss, expected_gradient = _loss_and_formula(device, torch.float32, softcap)
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=TOLERANCE)


def _loss_and_formula(
    device: str, dtype: torch.dtype, softcap: float | None, vocabulary: int = 700
) -> tuple[torch.Tensor, ...]:
    """Return a fused head's loss and gradient, and the formula's in float64."""
    torch.manual_seed(2)
    norm = nn.RMSNorm(D, eps=1e-6, dtype=dtype, device=device).requires_grad_(False)
    weight = torch.randn(vocabulary, D).to(device, dtype)
    hidden = torch.randn(1, 11, D).to(device, dtype)
    tokens = torch.randint(0, vocabulary, (11,)).to(device)
    head = LossHead(
        norm, weight.split(256), compute_dtype=dtype, chunk_positions=4, softcap=softcap, fused=True
    )
    loss, gradient = head.loss_and_gradient(hidden, Targets(torch.arange(11, device=device), tokens), 5)
    exact = hidden.double().requires_grad_()
    logits = F.rms_norm(exact, (D,), norm.weight.double(), norm.eps)[0] @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, tokens, reduction="sum") / 5
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    return loss.double(), gradient.double(), expected.detach(), expected_gradient


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("columns", [16384, 4608, 333])
def test_on_a_gpu_the_kernel_does_what_eager_operations_do(softcap: float | None, columns: int) -> None:
    found, expected = (make_state("cuda", torch.bfloat16, columns) for _ in range(2))
    weights, _ = loss_kernel.fused_terms(*found, softcap=softcap, training=True)
    expected_weights, _ = eager_terms(*expected, softcap=softcap, training=True)
    # Of numbers with one sign the bit patterns are in the order of the values.
    assert weights.dtype == expected_weights.dtype == torch.bfloat16
    assert (weights.signbit() == expected_weights.signbit()).all()
    units = weights.view(torch.int16).int() - expected_weights.view(torch.int16).int()
    assert units.abs().max() <= BFLOAT16_UNITS
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=GPU_TOLERANCE, atol=GPU_TOLERANCE)


def test_without_triton_the_message_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "poros.engine.loss_kernel", None)
    with pytest.raises(UserError, match="blocks: eager"):
        LossHead(
            nn.RMSNorm(D),
            [torch.ones(2, D)],
            compute_dtype=torch.float32,
            chunk_positions=4,
            softcap=None,
            fused=True,
        )
