"""The gates of the drop-in module: against the engine, and streamed against resident."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from poros.engine.targets import count_supervised
from poros.interfaces import ParityCase
from poros.parity.case_run import CaseRun, start_case
from poros.parity.compare import Verdict
from poros.plugins import Registry
from poros.settings import Plan
from poros.torch_module.build import make_module

__all__ = ["case_module", "module_against_engine", "module_residency"]

RESIDENT = Plan(residency="resident")


def case_module(run: CaseRun, plan: Plan) -> Any:
    """Return a case's model as a PEFT module; its adapters begin where the run's bank stands, which is emptied."""
    return make_module(run.model, plan, path=run.model.meta.parts.blocks, name=run.case.name)


def backward_step(module: Any, run: CaseRun, step: int) -> list[torch.Tensor]:
    """Run one optimizer step's micro-batches forward and backward under autograd and return their losses."""
    batches = run.micro_batches(step)
    count = sum(count_supervised(batch) for batch in batches)
    losses = []
    for batch in batches:
        loss = module(input_ids=batch.input_ids, labels=batch.labels, num_items_in_batch=count).loss
        loss.backward()
        losses.append(loss.detach())
    return losses


def module_against_engine(
    case: ParityCase, registry: Registry, device: torch.device, plan: Plan | None = None
) -> Verdict:
    """Compare one step's losses and gradients under autograd with those of the resident engine, bit by bit.

    Without dropout: the engine seeds its masks by optimizer step and micro-batch, which a module cannot know.
    """
    plan = plan or Plan(num_slots=2)
    case = replace(case, lora={**case.lora, "dropout": 0.0}, blocks="eager")
    oracle = start_case(case, replace(RESIDENT, graphs=False), registry, device)
    run = start_case(case, plan, registry, device)
    try:
        expected = list(oracle.engine.step(oracle.micro_batches(0), 0).losses)
        gradients = oracle.model.adapter_tensors(oracle.model.bank.gradients)
        module = case_module(run, plan)
        found = backward_step(module.train(), run, 0)
        pairs = {f"loss {index}": pair for index, pair in enumerate(zip(expected, found, strict=True))}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                pairs[name] = gradients[name.replace(".default.", ".")], parameter.grad
        return _verdict(pairs, len(gradients) + len(expected))
    finally:
        oracle.close()
        run.close()


def module_residency(
    case: ParityCase, registry: Registry, device: torch.device, plan: Plan, num_steps: int
) -> Verdict:
    """Compare the streamed module with the resident one over optimizer steps of torch's AdamW, dropout included."""
    states = []
    for placement in (RESIDENT, plan):
        run = start_case(replace(case, blocks="eager"), placement, registry, device)
        try:
            states.append(_train(case_module(run, placement), run, num_steps))
        finally:
            run.close()
    return _verdict({name: (states[0][name], value) for name, value in states[1].items()}, len(states[0]))


def _train(module: Any, run: CaseRun, num_steps: int) -> dict[str, torch.Tensor]:
    module.train()
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    record: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        for index, loss in enumerate(backward_step(module, run, step)):
            record[f"step {step}, loss {index}"] = loss
        for name, parameter in parameters.items():
            assert parameter.grad is not None, name
            record[f"step {step}, gradient of {name}"] = parameter.grad.clone()
        optimizer.step()
        for name, parameter in parameters.items():
            record[f"step {step}, {name}"] = parameter.detach().clone()
    return record


def _verdict(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], expected: int) -> Verdict:
    """Return the verdict over named (oracle, candidate) pairs."""
    if len(pairs) != expected:
        return Verdict("cannot compare", f"{expected} tensors against {len(pairs)}", 0)
    for name, (oracle, candidate) in pairs.items():
        if not bool(torch.isfinite(oracle).all()):
            return Verdict("cannot compare", f"{name} of the oracle is not finite", 0)
        if oracle.dtype != candidate.dtype or not torch.equal(oracle, candidate):
            return Verdict("different", f"{name}: {oracle.flatten()[:3]} and {candidate.flatten()[:3]}", 0)
    return Verdict("equal", "", len(pairs))
