"""AdamW over the flat bank: one fused call per group, one norm, one schedule."""

from __future__ import annotations

import torch
from torch import nn
from transformers import get_scheduler

from poros.bank import AdapterBank
from poros.settings import OptimizerSettings

__all__ = ["MOMENTS", "BankOptimizer"]

MOMENTS = ("exp_avg", "exp_avg_sq")


class BankOptimizer:
    """Steps the bank's weights with the bank's gradients.

    Args:
        bank: weights and gradients; the optimizer's parameters share their memory.
        settings: learning rate, betas, decay, clipping, schedule.
        num_training_steps: what the schedule's end refers to.
    """

    def __init__(self, bank: AdapterBank, settings: OptimizerSettings, num_training_steps: int) -> None:
        self._settings = settings
        self._parameters = {group: nn.Parameter(weights) for group, weights in bank.weights.items()}
        for group, parameter in self._parameters.items():
            parameter.grad = bank.gradients[group]
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._scheduler = get_scheduler(
            settings.schedule,
            self._optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=num_training_steps,
        )
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter.data) for moment in MOMENTS},
            }

    def clip(self) -> torch.Tensor:
        """Scale the gradients to the maximal norm and return the norm before scaling, a float32 scalar.

        The norm is one reduction per group; it differs from a per-tensor norm by rounding.
        """
        limit = self._settings.max_grad_norm
        return nn.utils.clip_grad_norm_(self._parameters.values(), float("inf") if limit is None else limit)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """Update the weights and advance the schedule."""
        self._optimizer.step()
        self._scheduler.step()

    def moments(self, moment: str) -> dict[str, torch.Tensor]:
        """Return one moment (of `MOMENTS`) per group, flat like the bank."""
        return {group: self._optimizer.state[p][moment] for group, p in self._parameters.items()}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold besides the weights: moments and step counts."""
        tensors = {}
        for group, parameter in self._parameters.items():
            for name, value in self._optimizer.state[parameter].items():
                tensors[f"{group}.{name}"] = value
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Restore `state_tensors` and the schedule's position, after ``step`` completed optimizer steps."""
        for name, value in self.state_tensors().items():
            value.copy_(tensors[name])
        self._scheduler.last_epoch = step
        self._scheduler._step_count = step + 1
        rates = [
            scale(step) * base
            for scale, base in zip(self._scheduler.lr_lambdas, self._scheduler.base_lrs, strict=True)
        ]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._scheduler._last_lr = rates
