"""The end of a run: one table and one picture, printed and kept in the run folder."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .config import Config
from .evaluation import Score
from .files import write_atomic
from .monitor import read_metrics
from .picture import draw_run

TABLE, FACTS, PICTURE = "summary.md", "summary.json", "summary.png"


@dataclass
class Row:
    """One line of the table; `chance` is what a router shows whose choices are random and fair."""

    measure: str
    value: float
    form: str
    chance: float | None = None


@dataclass
class Summary:
    """The result of a run."""

    rows: list[Row]
    first_step: int  # of the averaged part
    last_step: int
    trained: bool  # whether the folder has training steps to average
    table_path: Path
    picture_path: Path

    def table(self) -> str:
        """The rows as a Markdown table with aligned columns."""
        header = ("measure", "value", "fair random router")
        cells = [
            (row.measure, _show(row.value, row.form), "" if row.chance is None else _show(row.chance, row.form))
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in [header, *cells]) for i in range(3)]
        rule = (f"{'-' * widths[0]}", f"{'-' * (widths[1] - 1)}:", f"{'-' * (widths[2] - 1)}:")
        lines = [
            f"| {first:<{widths[0]}} | {second:>{widths[1]}} | {third:>{widths[2]}} |"
            for first, second, third in [header, rule, *cells]
        ]
        note = (
            f"Balance, throughput and training loss: mean over steps {self.first_step} to {self.last_step} and over layers; "
            "tokens/s: median."
        )
        return "\n".join([*lines, "", note if self.trained else "This folder holds no record of the training steps."])


def write_summary(config: Config, scores: dict[str, Score], folder: Path) -> Summary:
    """Compute the table from the run's metrics and final scores; write summary.md, summary.json and summary.png."""
    steps = [line for line in read_metrics(folder) if "train/loss" in line]
    first = config.run.steps - max(1, math.ceil(config.run.tail * config.run.steps)) + 1
    tail = [line for line in steps if line["step"] >= first] or steps[-1:]
    averaged = [line["step"] for line in tail] or [config.run.steps]
    summary = Summary(_rows(config, scores, tail), averaged[0], averaged[-1], bool(tail), folder / TABLE, folder / PICTURE)
    facts = {
        "steps": [summary.first_step, summary.last_step],
        "rows": {row.measure: {"value": _finite(row.value), "fair_random_router": row.chance} for row in summary.rows},
        "validation": {name: _facts(score) for name, score in scores.items()},
    }
    write_atomic(folder / FACTS, json.dumps(facts) + "\n")
    write_atomic(folder / TABLE, summary.table() + "\n")
    draw_run(folder, folder / PICTURE, summary.first_step, {name: score.load for name, score in scores.items()})
    return summary


def _rows(config: Config, scores: dict[str, Score], tail: list[dict[str, Any]]) -> list[Row]:
    model = config.model
    rows = [Row(f"validation bits per byte, {name}", score.bits_per_byte, ".3f") for name, score in scores.items()]
    if not tail:  # the steps were taken in another folder, or their record is gone
        return rows
    rows += [
        Row("training loss (nats per token)", _mean(tail, "train/loss"), ".3f"),
        Row("global MaxVio", _mean(tail, "balance/maxvio/mean"), ".3f", _mean(tail, "balance/floor/mean")),
        Row("local MaxVio", _mean(tail, "balance/maxvio_local/mean"), ".3f", _mean(tail, "balance/floor_local/mean")),
        Row("local MaxVio, worst microbatch", _mean(tail, "balance/maxvio_local_worst/mean"), ".3f"),
        Row("same-batch residual MaxVio", _mean(tail, "balance/residual/mean"), ".3f"),
        Row("dead experts per layer", _mean(tail, "balance/dead/mean"), ".2f"),
        Row("intervention rate", _mean(tail, "balance/intervention/mean"), ".1%", 1 - model.top_k / model.num_experts),
        Row("dropped assignments per step", _mean(tail, "train/dropped"), ".1f"),
        Row("skipped steps", tail[-1]["train/bad_steps"], ".0f"),
        Row("tokens/s", median(line["train/tokens_per_second"] for line in tail), ",.0f"),
    ]
    unasked = {"same-batch residual MaxVio": model.measure_residual, "dropped assignments per step": model.capacity_factor}
    return [row for row in rows if unasked.get(row.measure, True)]


def _mean(lines: list[dict[str, Any]], key: str) -> float:
    values = [line[key] for line in lines if line.get(key) is not None]
    return fmean(values) if values else math.nan


def _show(value: float, form: str) -> str:
    return "n/a" if math.isnan(value) else format(value, form)


def _facts(score: Score) -> dict[str, Any]:
    plain = {key: _finite(value) if isinstance(value, float) else value for key, value in asdict(score).items()}
    return plain | {"load": score.load.tolist()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
