"""What a run records: scalars to TensorBoard and, line by line, to metrics.jsonl; per layer, averages over windows of steps.

The number of scalars does not grow with the model: per-layer values are recorded as minimum, mean and maximum over layers. What
each layer and expert did is recorded once per window (run.image_every): a line of layers.jsonl, and a heat map of the load.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..balancers import BalanceReport
from .files import write_atomic

METRICS, LAYERS = "metrics.jsonl", "layers.jsonl"
PIXELS = 12  # of the heat map's cells in TensorBoard
# The charts that matter, in TensorBoard's tab "Custom scalars": {group: {chart: [kind, tags or patterns of tags]}}.
LAYOUT = {
    "Loss": {
        "training (nats per token)": ["Multiline", ["train/loss"]],
        "validation (bits per byte)": ["Multiline", ["validation/bits_per_byte/.*"]],
    },
    "Balance": {
        "MaxVio of the step, and its floor": ["Multiline", ["balance/maxvio/mean", "balance/floor/mean"]],
        "MaxVio of microbatches, and its floor": ["Multiline", ["balance/maxvio_local/mean", "balance/floor_local/mean"]],
        "MaxVio, mean and range over layers": [
            "Margin",
            ["balance/maxvio/mean", "balance/maxvio/min", "balance/maxvio/max"],
        ],
        "dead experts per layer": ["Multiline", ["balance/dead/mean", "balance/dead/max"]],
    },
    "Router": {
        "intervention rate": ["Multiline", ["balance/intervention/mean"]],
        "balancing losses": ["Multiline", ["balance_loss/.*"]],
        "gradient norm: all, routers": ["Multiline", ["train/grad_norm", "train/router_grad_norm"]],
    },
    "Speed": {
        "tokens per second": ["Multiline", ["train/tokens_per_second"]],
        "learning rate": ["Multiline", ["train/lr"]],
    },
}


class Monitor:
    """Writer of a run folder's metrics.

    Args:
        folder: the run folder.
        step: the step that the run continues from; lines and events of later steps, which a killed run wrote after its
            last checkpoint, are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        kept = _truncate(folder / METRICS, step)
        #: steps whose validation is recorded
        self.validated = {line["step"] for line in kept if any(key.startswith("validation/") for key in line)}
        _truncate(folder / LAYERS, step)
        self._lines = (folder / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._board.add_custom_scalars(LAYOUT)
        self._window = Window()

    def record(self, step: int, values: dict[str, float]) -> None:
        """Write scalars of `step`; what is not finite becomes null in the JSON."""
        line = {"step": step} | {key: _finite(value) for key, value in values.items()}
        if any(key.startswith("validation/") for key in line):
            self.validated.add(step)
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        for key, value in values.items():
            self._board.add_scalar(key, value, step)

    def add(self, report: BalanceReport) -> None:
        """Take a step into the current window."""
        self._window.add(report)

    def end_window(self, step: int) -> None:
        """Record what the window gathered, and begin the next."""
        if self._window.steps:
            with (self.folder / LAYERS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step} | self._window.to_dict()) + "\n")
            self._board.add_image("balance/load", heat_map(relative_load(self._window.load)), step, dataformats="HWC")
        self._window = Window()

    def close(self) -> None:
        self._lines.close()
        self._board.close()


class Window:
    """Sums per layer over the good steps of a window."""

    def __init__(self) -> None:
        self.steps = 0
        self.load = np.zeros((0, 0), dtype=np.int64)  # (L, E) assignments
        self.sums: dict[str, NDArray[np.float64]] = {}  # {metric: (L,)}

    def add(self, report: BalanceReport) -> None:
        load = np.stack([layer.cpu().numpy() for layer in report.counts])
        self.load = self.load + load if self.steps else load
        for metric, layers in report.layers.items():
            self.sums[metric] = self.sums.get(metric, 0.0) + layers.numpy()
        self.steps += 1

    def to_dict(self) -> dict[str, Any]:
        """The load and, per layer, each metric's mean over the steps; a metric that some step lacked is null."""
        means = {metric: [_finite(value / self.steps) for value in sums] for metric, sums in self.sums.items()}
        return {"steps": self.steps, "load": self.load.tolist()} | means


def balance_scalars(report: BalanceReport) -> dict[str, float]:
    """A balance report as scalars with a bounded number of keys; what does not apply (NaN in every layer) is left out."""
    scalars = {}
    for metric, layers in report.layers.items():
        known = layers[~layers.isnan()]
        if len(known):
            for kind, value in (("min", known.min()), ("mean", known.mean()), ("max", known.max())):
                scalars[f"balance/{metric}/{kind}"] = float(value)
    for name, layers in report.losses.items():
        scalars[f"balance_loss/{name}"] = float(layers.mean())
    return scalars


def relative_load(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """(L, E) token counts -> load divided by the layer's fair share."""
    return counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)


def heat_map(load: NDArray[np.float64]) -> NDArray[np.uint8]:
    """(L, E) relative load -> (H, W, 3) pixels, from 0 (dark) to twice the fair share (bright)."""
    from matplotlib import colormaps

    pixels = colormaps["cividis"](np.clip(load / 2, 0, 1))[..., :3]
    return (pixels * 255).astype(np.uint8).repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last line that a kill cut short is dropped."""
    return _read_lines(folder / METRICS)


def read_layers(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's layers.jsonl, one per window: step (its last), steps (how many good ones), load (L, E) and, for each
    metric of `BalanceReport.layers`, its mean over the steps, (L,)."""
    return _read_lines(folder / LAYERS)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _truncate(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines after `step`; return those that stay."""
    if not path.exists():
        return []
    kept = [line for line in _read_lines(path) if line["step"] <= step]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
