"""What the runs of a plan showed, as tidy tables: one row per run, and one per run and layer."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..files import write_atomic
from ..monitor import read_layers
from ..summary import FACTS
from .plan import Plan, PlannedRun
from .runs import is_finished
from .statistics import Estimate, estimate, paired

RESULTS, BY_LAYER = "results.csv", "layers.csv"
# Column of results.csv: row of a run's summary.
MEASURES = {
    "train_loss": "training loss (nats per token)",
    "maxvio_global": "global MaxVio",
    "maxvio_local": "local MaxVio",
    "maxvio_local_worst": "local MaxVio, worst microbatch",
    "residual": "same-batch residual MaxVio",
    "dead": "dead experts per layer",
    "intervention": "intervention rate",
    "dropped": "dropped assignments per step",
    "skipped_steps": "skipped steps",
    "tokens_per_second": "tokens/s",
}
FLOORS = {"floor_global": "maxvio_global", "floor_local": "maxvio_local"}  # what a fair random router shows
# Of layers.csv: metrics of `BalanceReport.layers`.
LAYER_METRICS = ("maxvio", "maxvio_local", "intervention", "residual", "dead")


@dataclass(frozen=True)
class Result:
    """One finished run."""

    run: PlannedRun
    values: dict[str, float]  # by column; NaN where a measure does not apply
    layers: list[dict[str, float]]  # per layer, its mean over the averaged steps


def read_results(plan: Plan) -> list[Result]:
    """The runs of the plan that are finished, in its order."""
    return [_read(run) for run in plan.runs if is_finished(run)]


def _read(run: PlannedRun) -> Result:
    facts = json.loads((run.folder / FACTS).read_text(encoding="utf-8"))
    rows, validation = facts["rows"], facts["validation"]
    values = {"validation_loss": fmean(_number(score["loss"]) for score in validation.values())}
    values |= {f"bits_per_byte_{name}": _number(score["bits_per_byte"]) for name, score in validation.items()}
    values |= {column: _number(rows.get(row, {}).get("value")) for column, row in MEASURES.items()}
    values |= {column: _number(rows.get(MEASURES[measure], {}).get("fair_random_router")) for column, measure in FLOORS.items()}
    return Result(run, values, _layers(run, facts["steps"][0]))


def _layers(run: PlannedRun, first: int) -> list[dict[str, float]]:
    """Per layer, the mean over the windows that lie in the averaged part of the run, each by its steps."""
    windows = [line for line in read_layers(run.folder) if line["step"] - line["steps"] + 1 >= first]
    if not windows:
        return []
    steps = sum(line["steps"] for line in windows)
    return [
        {
            metric: sum(_number(line.get(metric, [None] * len(windows[0]["load"]))[layer]) * line["steps"] for line in windows)
            / steps
            for metric in LAYER_METRICS
        }
        for layer in range(len(windows[0]["load"]))
    ]


def write_tables(plan: Plan, results: Sequence[Result]) -> None:
    """Write results.csv and layers.csv of the comparison's folder. What does not apply is empty."""
    swept = list(dict.fromkeys(key for variant in plan.variants for key in variant.settings))
    rows, layers = [], []
    for result in results:
        variant = result.run.variant
        who = {"method": variant.method, "label": variant.label, "seed": result.run.seed}
        who |= {key: variant.settings.get(key, "") for key in swept}
        steps = {"steps": result.run.config.run.steps}
        rows.append(who | steps | {key: _cell(value) for key, value in result.values.items()} | {"command": result.run.command})
        for layer, values in enumerate(result.layers):
            layers.append(who | {"layer": layer} | {key: _cell(value) for key, value in values.items()})
    for name, table in ((RESULTS, rows), (BY_LAYER, layers)):
        write_atomic(plan.out / name, _csv(table))


@dataclass(frozen=True)
class Summary:
    """One variant over its seeds."""

    by_seed: dict[str, dict[int, float]]  # {column: {seed: value}}
    estimates: dict[str, Estimate]
    differences: dict[str, Estimate]  # to the baseline, within seeds


def summarise(plan: Plan, results: Sequence[Result]) -> dict[str, Summary]:
    """{label: Summary} of the variants that have a finished run, in the plan's order."""
    columns = list(dict.fromkeys(column for result in results for column in result.values))
    found: dict[str, dict[str, dict[int, float]]] = {}
    for variant in plan.variants:
        mine = [result for result in results if result.run.variant is variant]
        if mine:
            found[variant.label] = {
                column: {result.run.seed: result.values.get(column, math.nan) for result in mine} for column in columns
            }
    baseline = found.get(plan.baseline.label, {})
    return {
        label: Summary(
            by_seed,
            {column: estimate(list(values.values())) for column, values in by_seed.items()},
            {column: paired(values, baseline.get(column, {})) for column, values in by_seed.items()},
        )
        for label, by_seed in found.items()
    }


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _cell(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
