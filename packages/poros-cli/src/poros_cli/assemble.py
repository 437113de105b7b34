"""From the settings of `poros train` to a trainer: the model, its tokenizer, the rows, the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.checkpoint import prepare_output_folder
from poros.errors import CheckpointError, ConfigError, explain
from poros.plugins import Registry
from poros.run import OpenModel, Reporter, RunSettings, Trainer, open_model
from poros.run.device import refuse_many_processes, resolve_device
from poros.run.fingerprint import flatten
from poros.run.reporters import make_reporters
from poros.units import parse_size
from poros_cli.config import RunConfig
from poros_cli.gate_text import verdict_sentence
from poros_cli.sample_prompts import read_prompts, sample_prompts
from poros_cli.stop_token import stop_token_warnings
from poros_cli.tokenizer import load_tokenizer, stop_token_ids
from poros_data import Dataset, Sources, StepPlan, eval_batches, hold_out, load_dataset, padding_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Assembled", "assemble", "run_settings"]

# Inside `cache_dir`, beside the quantized stores.
ROWS_FOLDER = "rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """A trainer and what it was made from."""

    trainer: Trainer
    model: OpenModel
    tokenizer: PreTrainedTokenizerBase
    rows: Dataset


def assemble(
    config: RunConfig, registry: Registry, *, reporters: Sequence[Reporter], say: Callable[[str], None]
) -> Assembled:
    """Check everything that can be checked cheaply, cheapest first, and return a trainer that is ready to load.

    Args:
        config: the settings.
        registry: the loaded plugins.
        reporters: receive the run's events, before those that `report_to` names.
        say: shows a line to the user.

    Raises:
        UserError, DataError: whatever is wrong with the user's input; nothing on the disk has been changed by then.
    """
    refuse_many_processes()
    device = resolve_device(config.device)
    named = make_reporters(config.report_to, registry, Path(config.output).expanduser())
    prompts = read_prompts(config.sample_prompts)
    # Asked here because reading rows may take a while; the trainer asks again and acts on it.
    prepare_output_folder(Path(config.output), resume=config.resume or config.overwrite)
    model = open_model(
        config.model,
        quantization=config.quantization,
        lora=config.lora,
        numerics=config.numerics,
        registry=registry,
    )
    say(_describe(model))
    say(verdict_sentence(model.verdict, device))
    if config.rows.packing:
        _require_packing(model)
    tokenizer = load_tokenizer(model.folder)
    rows = _read(config.data, model, tokenizer, config, say)
    for warning in stop_token_warnings(model.folder, tokenizer, rows.report.last_supervised_id):
        say(f"warning: {warning}")
    held_out = _read(config.eval_data, model, tokenizer, config, say) if config.eval_data else None
    if config.eval_fraction is not None:
        rows, held_out = hold_out(rows, config.eval_fraction, seed=config.seed)
        say(rows.report.notes[-1])
    pad_id = padding_id(tokenizer)
    batching: dict[str, Any] = {
        "micro_batch_size": config.micro_batch_size,
        "length_bucket": config.numerics.length_bucket,
        "pad_id": pad_id,
    }
    steps = StepPlan(
        rows.rows,
        micro_batches_per_step=config.micro_batches,
        seed=config.seed,
        num_epochs=_num_epochs(config),
        max_steps=config.max_steps,
        order=config.rows.order,
        weights=rows.row_weights,
        packed_length=config.max_length if config.rows.packing else None,
        **batching,
    )
    trainer = Trainer(
        model,
        steps,
        run_settings(config),
        evaluation=eval_batches(held_out.rows, **batching) if held_out else (),
        samples=sample_prompts(prompts, tokenizer, model, config) if prompts else None,
        reporters=(*reporters, *named),
        data_record={
            **rows.parts,
            **batching,
            "micro_batches": config.micro_batches,
            "order": config.rows.order,
            "weights": list(rows.weights),
            "packing": config.rows.packing,
        },
        run_record={
            "config": flatten(config),
            "data": {
                "training": rows.report.record(),
                "held_out": None if held_out is None else held_out.report.record(),
            },
        },
    )
    return Assembled(trainer=trainer, model=model, tokenizer=tokenizer, rows=rows)


def run_settings(config: RunConfig) -> RunSettings:
    """Return what the trainer is told besides the model and its rows."""
    return RunSettings(
        output=config.output,
        device=config.device,
        seed=config.seed,
        save_every=config.save_every,
        eval_every=config.eval_every,
        early_stop_patience=config.early_stop_patience,
        early_stop_min_delta=config.early_stop_min_delta,
        sample_every=config.sample_every,
        keep_checkpoints=config.keep_checkpoints,
        keep_best=config.keep_best,
        resume=config.resume,
        overwrite=config.overwrite,
        cache_dir=config.cache_dir,
        device_budget_bytes=None if config.vram is None else parse_size(config.vram, "vram"),
        host_budget_bytes=None if config.ram is None else parse_size(config.ram, "ram"),
        optimizer=config.optimizer,
        plan=config.plan,
    )


def _num_epochs(config: RunConfig) -> int | None:
    """Return one epoch where nobody said how long; ``max_steps`` alone repeats the rows as often as it needs."""
    return 1 if config.epochs is None and config.max_steps is None else config.epochs


def _describe(model: OpenModel) -> str:
    status = model.verdict.status.replace("_", " ")
    return (
        f"{model.name}: {model.meta.architecture.name} ({status}, from {model.verdict.distribution}), "
        f"{len(model.meta.blocks)} blocks, {model.weight_format.name}"
    )


def _read(
    sources: Sources,
    model: OpenModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    say: Callable[[str], None],
) -> Dataset:
    dataset = load_dataset(
        sources,
        tokenizer,
        max_length=config.max_length,
        settings=config.rows,
        stop_token_ids=stop_token_ids(model.folder),
        cache_dir=None if config.cache_dir is None else Path(config.cache_dir).expanduser() / ROWS_FOLDER,
    )
    _check_vocabulary(dataset, int(model.meta.config.vocab_size))
    for line in dataset.report.lines():
        say(line)
    if dataset.report.dropped:
        say("`poros data preview` with this config shows the lengths of all rows")
    return dataset


def _require_packing(model: OpenModel) -> None:
    """Refuse to pack rows for a family whose samples would see each other."""
    architecture = model.meta.architecture
    if architecture.packs_rows:
        return
    types = sorted({architecture.layer_type(model.config, index) for index in range(len(model.meta.blocks))})
    raise ConfigError(
        explain(
            "Cannot pack rows for this model",
            expected="a family whose blocks keep the samples of a row apart by their positions",
            got=f"`{architecture.name}` with {' and '.join(f'`{name}`' for name in types)} blocks",
            where="rows.packing",
            next_step="Set `rows.packing: false`; `rows.order: length-sorted` saves padding too",
        )
    )


def _check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Refuse token ids that the embedding does not have, before a lookup fails on the device."""
    for row in dataset.rows:
        highest = max(row.input_ids)
        if highest >= vocab_size:
            raise CheckpointError(
                explain(
                    "The tokenizer does not fit the model",
                    expected=f"token ids below {vocab_size} (`vocab_size` in config.json)",
                    got=highest,
                    where=dataset.where(row),
                    next_step="Use the tokenizer that belongs to these weights",
                )
            )
