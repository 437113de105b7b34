"""AdamW over the flat bank: one fused call per group, one norm, one schedule."""

from __future__ import annotations

import torch
from torch import nn
from transformers import get_scheduler

from poros import optimizer_8bit
from poros.bank import AdapterBank
from poros.errors import ConfigError, explain
from poros.settings import OptimizerSettings

__all__ = ["MOMENTS", "BankOptimizer", "check_optimizer", "moment_bytes_per_element"]

MOMENTS = ("exp_avg", "exp_avg_sq")
FLOAT32_BYTES = 4


def check_optimizer(settings: OptimizerSettings, num_steps: int) -> None:
    """Refuse before weights are read what `BankOptimizer` could not do.

    Args:
        settings: the optimizer's.
        num_steps: optimizer steps of the whole run.

    Raises:
        ConfigError: warm-up and decay are longer than the run, or bitsandbytes is needed and missing.
    """
    rising_and_falling = settings.warmup_steps + settings.decay_steps
    if rising_and_falling > num_steps:
        raise ConfigError(
            explain(
                "The learning rate's schedule is longer than the run",
                expected=f"warm-up and decay of at most {num_steps} optimizer steps together",
                got=f"`warmup_steps` {settings.warmup_steps} and `decay_steps` {settings.decay_steps}",
                where=f"optimizer.schedule: {settings.schedule}",
                next_step="Lower them, or raise `max_steps` or `epochs`",
            )
        )
    if settings.name == optimizer_8bit.NAME:
        optimizer_8bit.require()


def moment_bytes_per_element(name: str) -> float:
    """Return the bytes that both moments of one adapter element take, by the optimizer's name."""
    if name == optimizer_8bit.NAME:
        return len(MOMENTS) * optimizer_8bit.BYTES_PER_ELEMENT
    return len(MOMENTS) * FLOAT32_BYTES


class BankOptimizer:
    """Steps the bank's weights with the bank's gradients.

    Attributes:
        quantities: names of everything that the optimizer keeps per element or block of elements; see `moments`.

    Args:
        bank: weights and gradients; the optimizer's parameters share their memory.
        settings: learning rate, betas, decay, clipping, schedule.
        num_training_steps: what the schedule's end refers to.

    Raises:
        ConfigError: see `check_optimizer`.
    """

    def __init__(self, bank: AdapterBank, settings: OptimizerSettings, num_training_steps: int) -> None:
        self._settings = settings
        self._parameters = {group: nn.Parameter(weights) for group, weights in bank.weights.items()}
        for group, parameter in self._parameters.items():
            parameter.grad = bank.gradients[group]
        check_optimizer(settings, num_training_steps)
        # One parameter group for each group of the bank: LoRA+ gives them different rates.
        ratios = {"lora_B": settings.lora_plus_ratio}
        groups = [
            {"params": [parameter], "lr": settings.learning_rate * ratios.get(group, 1.0)}
            for group, parameter in self._parameters.items()
        ]
        if settings.name == optimizer_8bit.NAME:
            self._optimizer, self._keys = optimizer_8bit.make(groups, settings), optimizer_8bit.KEYS
        else:
            self._optimizer, self._keys = _adamw(groups, settings), dict(zip(MOMENTS, MOMENTS, strict=True))
        self.quantities = tuple(self._keys)
        specific = {"num_decay_steps": settings.decay_steps} if settings.decay_steps else None
        self._scheduler = get_scheduler(
            settings.schedule,
            self._optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=specific,
        )

    def clip(self) -> torch.Tensor:
        """Scale the gradients to the maximal norm and return the norm before scaling, a float32 scalar.

        The norm is one reduction per group; it differs from a per-tensor norm by rounding.
        """
        limit = self._settings.max_grad_norm
        return nn.utils.clip_grad_norm_(self._parameters.values(), float("inf") if limit is None else limit)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of ``lora_A``."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """Update the weights and advance the schedule."""
        self._optimizer.step()
        self._scheduler.step()

    def moments(self, quantity: str) -> dict[str, torch.Tensor]:
        """Return one of `quantities` per group, as it is stored.

        The moments (of `MOMENTS`) are flat like the bank: float32, or uint8 codes with ``adamw_8bit``, which also has
        ``exp_avg_absmax`` and ``exp_avg_sq_absmax``: float32, one for every 256 elements.
        """
        return {
            group: self._optimizer.state[p][self._keys[quantity]] for group, p in self._parameters.items()
        }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must hold besides the weights: moments and step counts."""
        tensors = {}
        for group, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            tensors[f"{group}.step"] = torch.as_tensor(state["step"])
            for quantity, key in self._keys.items():
                tensors[f"{group}.{quantity}"] = state[key]
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Restore `state_tensors` and the schedule's position, after ``step`` completed optimizer steps."""
        for group, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            for quantity, key in self._keys.items():
                state[key].copy_(tensors[f"{group}.{quantity}"])
            count = tensors[f"{group}.step"]
            if isinstance(state["step"], torch.Tensor):
                state["step"].copy_(count)
            else:
                state["step"] = int(count)
        self._scheduler.last_epoch = step
        self._scheduler._step_count = step + 1
        rates = [
            scale(step) * base
            for scale, base in zip(self._scheduler.lr_lambdas, self._scheduler.base_lrs, strict=True)
        ]
        for parameter_group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            parameter_group["lr"] = rate
        self._scheduler._last_lr = rates


def _adamw(groups: list[dict[str, object]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return torch's fused AdamW with its state made: a checkpoint may be loaded before the first step."""
    optimizer = torch.optim.AdamW(
        groups,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter_group in optimizer.param_groups:
        for parameter in parameter_group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter.data) for moment in MOMENTS},
            }
    return optimizer
