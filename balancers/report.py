"""What one optimizer step did to the load: `BalanceReport`, computed from global integer counts."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from . import metrics


@dataclass(frozen=True)
class LayerSums:
    """One layer's step, summed over ranks and microbatches. Tensors are 0-dim unless said."""

    num_experts: int
    top_k: int
    biased: bool
    counts: Tensor  # (E,) int64
    tokens: Tensor
    microbatches: Tensor
    agreed: Tensor
    nan_rows: Tensor
    local_maxvio_sum: Tensor
    local_maxvio_worst: Tensor
    loss_names: tuple[str, ...]
    loss_sums: Tensor  # (number of loss_names,) float64


@dataclass(frozen=True)
class BalanceReport:
    """The balance of one optimizer step, per layer, over all ranks and microbatches.

    Nothing is copied from the device until `losses`, `layers` or `summary` is first asked for.

    Attributes:
        names: qualified name of each layer's router.
        sums: the step's sums per layer.
        extras: per layer, what its balancers report besides.
        residual_counts: per layer, (E,) counts of the step's tokens under the new bias, or None where not measured.
    """

    names: tuple[str, ...]
    sums: tuple[LayerSums, ...]
    extras: tuple[dict[str, Tensor], ...]
    residual_counts: tuple[Tensor | None, ...] = field(default=())

    @property
    def counts(self) -> list[Tensor]:
        """(E,) int64 assignments per expert, one tensor per layer: the rows of a load heat map."""
        return [layer.counts for layer in self.sums]

    @cached_property
    def losses(self) -> dict[str, Tensor]:
        """{balancer: (L,) float64}: its loss with its coefficient, mean over microbatches and ranks; NaN in layers without it.

        Balancers without a loss (biases) do not appear.
        """
        return {
            name: torch.stack([self._loss(layer, name) for layer in self.sums]).cpu() for name in sorted(self._loss_names())
        }

    @cached_property
    def layers(self) -> dict[str, Tensor]:
        """{metric: (L,) float64 on the CPU}. See `metrics` for each; NaN where a metric has no meaning.

        maxvio, minvio, cv, entropy, top10_share, dead, lis: of the whole step's counts (global). maxvio_local and
        maxvio_local_worst: mean and largest over microbatches x ranks. floor, floor_local: what sampling alone gives.
        intervention: share of choices overruled by the bias. residual: MaxVio of the step's own tokens under the new bias.
        """
        rows = [self._row(index) for index in range(len(self.sums))]
        names = dict.fromkeys(name for row in rows for name in row)
        nan = torch.tensor(math.nan, dtype=torch.float64)
        return {name: torch.stack([row.get(name, nan) for row in rows]) for name in names}

    def summary(self) -> str:
        """A table with one line per layer and one for their mean."""
        columns = {
            "MaxVio": "maxvio",
            "floor": "floor",
            "local": "maxvio_local",
            "worst": "maxvio_local_worst",
            "floor ": "floor_local",
            "dead": "dead",
            "overruled": "intervention",
            "residual": "residual",
        }
        shown = {title: self.layers[metric] for title, metric in columns.items()}
        shown |= {f"{name} loss": values for name, values in self.losses.items()}
        shown = {title: values for title, values in shown.items() if not values.isnan().all()}
        width = max(len("layer"), *(len(name) for name in self.names))
        lines = [f"{'layer':<{width}}" + "".join(f"{title.strip():>12}" for title in shown)]
        for index, name in enumerate(self.names):
            lines.append(f"{name:<{width}}" + "".join(_cell(float(values[index])) for values in shown.values()))
        if len(self.names) > 1:
            lines.append(f"{'mean':<{width}}" + "".join(_cell(float(values.nanmean())) for values in shown.values()))
        return "\n".join(lines)

    __str__ = summary

    def _row(self, index: int) -> dict[str, Tensor]:
        layer = self.sums[index]
        counts = layer.counts.cpu()
        tokens, microbatches = int(layer.tokens), int(layer.microbatches)
        residual = self.residual_counts[index] if self.residual_counts else None
        row = {
            "maxvio": metrics.max_vio(counts),
            "maxvio_local": layer.local_maxvio_sum.cpu() / microbatches if microbatches else math.nan,
            "maxvio_local_worst": layer.local_maxvio_worst.cpu() if microbatches else math.nan,
            "minvio": metrics.min_vio(counts),
            "cv": metrics.coefficient_of_variation(counts),
            "entropy": metrics.load_entropy(counts),
            "top10_share": metrics.top_share(counts),
            "dead": metrics.dead_experts(counts),
            "lis": metrics.lis(counts),
            "intervention": _intervention(layer),
            "residual": math.nan if residual is None else metrics.max_vio(residual.cpu()),
            "floor": metrics.sampling_floor(tokens, layer.num_experts, layer.top_k),
            "floor_local": metrics.sampling_floor(tokens // max(microbatches, 1), layer.num_experts, layer.top_k),
            "nan_rows": layer.nan_rows,
            "tokens": layer.tokens,
            **self.extras[index],
        }
        return {name: torch.as_tensor(value, dtype=torch.float64, device="cpu") for name, value in row.items()}

    def _loss(self, layer: LayerSums, name: str) -> Tensor:
        if name not in layer.loss_names:
            return layer.loss_sums.new_full((), math.nan)
        return layer.loss_sums[layer.loss_names.index(name)] / layer.microbatches

    def _loss_names(self) -> set[str]:
        return {name for layer in self.sums for name in layer.loss_names}


def _intervention(layer: LayerSums) -> Tensor | float:
    if not layer.biased:
        return math.nan
    return metrics.intervention_rate(layer.agreed.cpu(), layer.tokens.cpu(), layer.top_k)


def _cell(value: float) -> str:
    return f"{'-':>12}" if math.isnan(value) else f"{value:>12.4g}"
