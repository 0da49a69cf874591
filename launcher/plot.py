"""loss.png from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from launcher.metrics import Metrics


def draw_losses(metrics_file: Path, png: Path, *, title: str) -> None:
    """Training loss of every logged step and held-out loss of every evaluation, in nats."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    metrics = Metrics(metrics_file)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for key, label, marker in (("loss", "training", ""), ("eval/loss", "held out", "o")):
        steps, losses = metrics.series(key)
        if steps:
            axes.plot(steps, losses, marker=marker, markersize=4, linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    temporary = png.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=110)
    temporary.replace(png)
