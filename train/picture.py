"""One picture of a run: the loss, the balance over the steps, and where the load went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .monitor import read_metrics, relative_load

# Okabe and Ito's palette: distinct to every kind of colour vision, and in grey.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
LABELS = 16  # at most this many on an axis of the heat map
SMOOTHING = 0.02  # of the steps, on either side


def draw_run(folder: Path, path: Path, tail_from: int, loads: dict[str, NDArray[np.int64]]) -> None:
    """Draw the metrics of a run folder into a PNG; the averaged part of the run, from `tail_from`, is shaded.

    `loads` holds (L, E) token counts on the validation text of each domain.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(folder)
    steps = [line for line in lines if "train/loss" in line]
    figure = Figure(figsize=(14, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    loss, balance, load = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    _draw_loss(loss, steps, [line for line in lines if any(key.startswith("validation/loss/") for key in line)])
    _draw_balance(balance, steps, tail_from)
    _draw_load(figure, load, loads)
    for axes in (loss, balance):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xlabel("optimizer step")
        axes.set_xlim(left=0, right=max((line["step"] for line in steps), default=tail_from))
    figure.savefig(path)


def _draw_loss(axes: Any, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    at, values = _series(steps, "train/loss")
    axes.plot(at, values, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(at, smooth(values), color=BLUE, linewidth=1.8, label="training")
    names = [key for key in (evaluations[-1] if evaluations else {}) if key.startswith("validation/loss/")]
    for key, colour, marker in zip(names, (ORANGE, GREEN, GREY) * len(names), "osD^vP*X" * len(names), strict=False):
        at, values = _series(evaluations, key)
        label = f"validation, {key.rpartition('/')[2]}"
        axes.plot(at, values, color=colour, linewidth=1.2, marker=marker, markersize=4.5, label=label, clip_on=False)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Loss")
    axes.legend(frameon=False)


def _draw_balance(axes: Any, steps: list[dict[str, Any]], tail_from: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    curves = (("local", "maxvio_local", "floor_local", ORANGE), ("global", "maxvio", "floor", BLUE))
    for name, metric, floor, colour in curves:
        at, values = _series(steps, f"balance/{metric}/mean")
        axes.plot(at, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(at, smooth(values), color=colour, linewidth=1.8, label=f"{name} (a {_GROUP[name]})")
        at, values = _series(steps, f"balance/{floor}/mean")
        axes.plot(at, values, color=colour, linewidth=1.2, linestyle="--", label=f"{name}, fair random router")
    last = steps[-1]["step"] if steps else tail_from
    axes.axvspan(tail_from, last, color=GREY, alpha=0.12, linewidth=0, label="averaged in the table")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("MaxVio (busiest expert / fair share - 1)")
    axes.set_title("Load imbalance, mean over layers")
    axes.legend(frameon=False, fontsize=8.5)


_GROUP = {"local": "microbatch", "global": "step"}


def _draw_load(figure: Any, axes: Any, loads: dict[str, NDArray[np.int64]]) -> None:
    """One row per layer and domain: balanced layers still show which domain prefers which experts."""
    domains = list(loads)
    rows = np.stack([relative_load(counts) for counts in loads.values()], axis=1)  # (L, domains, E)
    layers, _, experts = rows.shape
    image = axes.imshow(rows.reshape(-1, experts), aspect="auto", cmap="PuOr_r", vmin=0, vmax=2, interpolation="nearest")
    for layer in range(1, layers):
        axes.axhline(layer * len(domains) - 0.5, color="black", linewidth=1)
    names = [f"{layer} {domain}" for layer in range(layers) for domain in domains]
    every = -(-len(names) // LABELS)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=8.5)
    axes.set_xticks(range(0, experts, -(-experts // LABELS)))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer and domain")
    axes.set_title("Load per expert on validation text")
    figure.colorbar(image, ax=axes, extend="max", label="tokens / fair share")


def _series(lines: list[dict[str, Any]], key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(steps, values) of one key, without the lines that lack it."""
    known = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return np.array([step for step, _ in known], dtype=int), np.array([value for _, value in known], dtype=float)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving mean, shorter at both ends."""
    reach = max(1, round(len(values) * SMOOTHING))
    total = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - reach, 0)
    high = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)
