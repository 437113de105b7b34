"""The curves of a run: what the optimizer did, and how fast."""

from __future__ import annotations

from poros_cli.report.charts import Chart, Series, draw
from poros_cli.report.run_files import RunFiles

__all__ = ["NOT_RECORDED", "level", "number", "training_charts", "values"]

NOT_RECORDED = "Not recorded by the version of Poros that made this run."


def training_charts(run: RunFiles) -> list[Chart]:
    """Return loss, held-out loss, learning rate, gradient norm, speed and step time, as far as there are any."""
    held_out = [(e["step"], e["eval_loss"]) for e in run.evaluations]
    limit = run.record["fingerprint"].get("optimizer.max_grad_norm")
    predicted = run.record.get("predicted_step") or {}
    seconds, tokens = predicted.get("seconds"), predicted.get("tokens")
    rate = tokens / seconds if seconds and tokens else None
    charts = [
        draw(
            "Loss",
            [
                Series(
                    name="training, mean of the step's supervised tokens",
                    colour="c1",
                    points=values(run, "loss"),
                ),
                Series(name="held-out rows", colour="c2", points=held_out),
            ],
            label=number,
            note="" if held_out else "No evaluation was recorded.",
        ),
        draw(
            "Learning rate",
            [Series(name="of the step", colour="c1", points=values(run, "learning_rate"))],
            label=number,
            from_zero=True,
        ),
        draw(
            "Gradient norm",
            [
                Series(name="before clipping", colour="c1", points=values(run, "grad_norm"), combine=max),
                Series(name="clipped to", colour="c3", points=level(run, limit), dashed=True),
            ],
            label=number,
            from_zero=True,
        ),
        draw(
            "Tokens per second",
            [
                Series(
                    name="measured, padding included", colour="c1", points=values(run, "tokens_per_second")
                ),
                Series(
                    name="predicted for the largest step", colour="c3", points=level(run, rate), dashed=True
                ),
            ],
            label=number,
            from_zero=True,
            note="Evaluations and checkpoints are not in it.",
        ),
        draw(
            "Seconds per step",
            [
                Series(name="whole step", colour="c1", points=values(run, "seconds")),
                Series(
                    name="of it, compute waited for copies",
                    colour="stall",
                    points=values(run, "exposed_copy_seconds"),
                ),
                Series(
                    name="predicted for the largest step",
                    colour="c3",
                    points=level(run, seconds),
                    dashed=True,
                ),
            ],
            label=number,
            from_zero=True,
        ),
    ]
    return [chart for chart in charts if chart is not None]


def values(run: RunFiles, name: str) -> list[tuple[float, float]]:
    """Return a field over the steps that have it."""
    return [(step["step"], step[name]) for step in run.steps if step.get(name) is not None]


def level(run: RunFiles, value: float | None) -> list[tuple[float, float]]:
    """Return a horizontal line over the steps that were done."""
    if value is None or not run.steps:
        return []
    return [(step["step"], value) for step in (run.steps[0], run.steps[-1])]


def number(value: float) -> str:
    """Return a number in at most four digits."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:.4g}"
