"""What a run records: scalars to TensorBoard and, line by line, to metrics.jsonl; a layer x expert heat map of the load.

The number of keys does not grow with the model: per-layer values are recorded as minimum, mean and maximum over layers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..balancers import BalanceReport
from .files import write_atomic

METRICS = "metrics.jsonl"
PIXELS = 12  # of the heat map's cells in TensorBoard


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
        self._lines = (folder / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._load: NDArray[np.int64] | None = None  # (L, E) counts since the last heat map

    def record(self, step: int, values: dict[str, float]) -> None:
        """Write scalars of `step`; what is not finite becomes null in the JSON."""
        line = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        if any(key.startswith("validation/") for key in line):
            self.validated.add(step)
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        for key, value in values.items():
            self._board.add_scalar(key, value, step)

    def add_load(self, counts: list[Tensor]) -> None:
        """Add a step's token counts per layer and expert to the current window."""
        layers = np.stack([layer.cpu().numpy() for layer in counts])
        self._load = layers if self._load is None else self._load + layers

    def draw_load(self, step: int) -> None:
        """Show the window's heat map in TensorBoard and begin the next window."""
        if self._load is not None:
            self._board.add_image("balance/load", heat_map(relative_load(self._load)), step, dataformats="HWC")
            self._load = None

    def close(self) -> None:
        self._lines.close()
        self._board.close()


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
    lines = []
    for text in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _truncate(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines after `step`; return those that stay."""
    if not path.exists():
        return []
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
