"""The report of a comparison: one HTML page that needs nothing else, and the same table as text."""

from __future__ import annotations

import importlib.resources
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from markupsafe import Markup, escape

from ..._version import __version__
from ..files import write_atomic
from . import figures
from .overhead import Overhead
from .plan import Plan, PlannedRun, Variant
from .results import Result, Summary
from .statistics import Estimate, pareto

REPORT, TEMPLATE = "report.html", "report.html.j2"


@dataclass(frozen=True)
class Column:
    """A measure of the table. `form` formats a value; a difference to the baseline is shown where `compared`."""

    key: str
    title: str
    form: str = ".3f"
    compared: bool = True
    percent: bool = False


BALANCE = (
    Column("maxvio_global", "global MaxVio"),
    Column("maxvio_local", "local MaxVio"),
    Column("residual", "residual MaxVio", compared=False),
    Column("dead", "dead experts per layer", ".2f", compared=False),
    Column("intervention", "intervention", ".1%", compared=False),
)


def columns(summaries: Mapping[str, Summary]) -> list[Column]:
    """The measures that some variant has."""
    known = next(iter(summaries.values())).estimates if summaries else {}
    bits = [
        Column(key, f"bits per byte, {key.removeprefix('bits_per_byte_')}", compared=False)
        for key in known
        if key.startswith("bits_")
    ]
    wanted = [Column("validation_loss", "validation loss"), *bits, *BALANCE]
    return [column for column in wanted if any(summary.estimates[column.key].n for summary in summaries.values())]


def text_table(plan: Plan, summaries: Mapping[str, Summary], overhead: Mapping[str, Overhead]) -> str:
    """One line per variant: mean +- standard error over seeds."""
    if not summaries:
        return "no run has finished"
    shown = columns(summaries)
    header = ["", *(column.title for column in shown), "step time"]
    lines = [header]
    for variant in plan.variants:
        if summary := summaries.get(variant.label):
            cells = [_plain(summary.estimates[column.key], column.form) for column in shown]
            lines.append([variant.label, *cells, step_time(plan, variant, overhead)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if i else f"{cell:<{width}}" for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def write_report(
    plan: Plan,
    results: Sequence[Result],
    summaries: Mapping[str, Summary],
    overhead: Mapping[str, Overhead],
    failed: Mapping[PlannedRun, str],
) -> Path:
    """Write report.html of the comparison's folder."""
    from jinja2 import Environment, StrictUndefined

    template = importlib.resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    config = plan.config
    finished = {result.run for result in results}
    shown = columns(summaries)
    pictures = []
    if results:
        trade_offs = [figures.scatter(plan, summaries, f"maxvio_{scope}", title) for scope, title, *_ in _MAXVIO]
        pictures = [
            ("Loss against balance", trade_offs),
            ("Balance over the steps", [image for _, *shown in _MAXVIO for image in figures.curves(plan, results, *shown)]),
        ]
    size = config.model.num_parameters()
    page = environment.from_string(template).render(
        name=plan.out.name,
        variants=len(plan.variants),
        seeds=sorted({run.seed for run in plan.runs}),
        steps=config.run.steps,
        tokens=config.run.steps * config.run.batch * config.run.seq_len,
        microbatches=config.run.batch // config.run.microbatch,
        tail=config.run.tail,
        size=size,
        model=config.model,
        domains=[source.name for source in config.data.sources],
        mode=config.data.mode,
        baseline=plan.baseline.label,
        findings=findings(plan, summaries),
        columns=shown,
        rows=[
            _row(plan, variant, summaries[variant.label], shown, overhead)
            for variant in plan.variants
            if variant.label in summaries
        ],
        chance=[_chance(results, column) for column in shown],
        pictures=pictures,
        heat_maps=figures.heat_maps(plan, results),
        scale=figures.scale(),
        missing=[(run.name, failed.get(run, "not finished")) for run in plan.runs if run not in finished],
        commands=[result.run.command for result in results],
        versions=f"evenload {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        measured_overhead=bool(overhead),
        turns=config.compare.turns,
    )
    return _write(plan.out / REPORT, page)


# Of the columns' names, title, metric of the steps, and what a fair random router shows.
_MAXVIO = (("global", "global MaxVio", "maxvio", "floor"), ("local", "local MaxVio", "maxvio_local", "floor_local"))


def findings(plan: Plan, summaries: Mapping[str, Summary]) -> list[str]:
    """What the table says, in a few sentences."""
    if not summaries:
        return []
    said = []
    balance = [(f"maxvio_{scope}", title) for scope, title, *_ in _MAXVIO]
    for key, title in (*balance, ("validation_loss", "validation loss")):
        ranked = {label: summary.estimates[key] for label, summary in summaries.items() if summary.estimates[key].n}
        if ranked:
            best = min(ranked, key=lambda label: ranked[label].mean)
            said.append(f"Lowest {title}: {best}, {_plain(ranked[best], '.3f')}.")
    said += _told_apart(plan.baseline.label, summaries)
    if all(estimate.n == 1 for summary in summaries.values() for estimate in [summary.estimates["validation_loss"]]):
        said.append("One seed: nothing here tells a difference from chance; give seeds=[0,1,2].")
    points = [
        (summary.estimates["maxvio_local"].mean, summary.estimates["validation_loss"].mean) for summary in summaries.values()
    ]
    front = [list(summaries)[index] for index in pareto(points)]
    said.append(f"No other is both better balanced (local MaxVio) and lower in validation loss than: {', '.join(front)}.")
    return said


def _told_apart(baseline: str, summaries: Mapping[str, Summary]) -> list[str]:
    """Which validation losses are above or below the baseline's by more than twice the standard error of the difference."""
    sides: dict[str, list[str]] = {"above": [], "below": [], "within": []}
    for label, summary in summaries.items():
        loss = summary.differences["validation_loss"]
        if label != baseline and loss.n > 1:
            side = "within" if abs(loss.mean) <= 2 * loss.error else "above" if loss.mean > 0 else "below"
            sides[side].append(label if side == "within" else f"{label} ({_signed(loss, '.3f')})")
    said = [
        f"Validation loss {side} that of {baseline} by more than two standard errors: {', '.join(sides[side])}."
        for side in ("below", "above")
        if sides[side]
    ]
    return [*said, f"Not told apart from it: {', '.join(sides['within'])}."] if sides["within"] else said


def step_time(plan: Plan, variant: Variant, overhead: Mapping[str, Overhead]) -> str:
    """Step time as a multiple of the baseline's, with its quartiles; "" where it was not measured."""
    if variant.method == plan.baseline.method:
        return "1" if overhead else ""
    measured = overhead.get(variant.method)
    return f"{measured.median:.2f} ({measured.low:.2f} to {measured.high:.2f})" if measured else ""


def _row(
    plan: Plan, variant: Variant, summary: Summary, shown: Sequence[Column], overhead: Mapping[str, Overhead]
) -> dict[str, object]:
    cells = []
    for column in shown:
        difference = ""
        if column.compared and variant is not plan.baseline and summary.differences[column.key].n:
            difference = _signed(summary.differences[column.key], column.form)
        cells.append((_plain(summary.estimates[column.key], column.form), difference))
    seeds = summary.estimates["validation_loss"].n
    return {
        "label": _breakable(variant.label),
        "baseline": variant is plan.baseline,
        "seeds": seeds,
        "cells": cells,
        "time": step_time(plan, variant, overhead),
    }


def _breakable(label: str) -> Markup:
    """A label that may be broken between balancers and before options."""
    return Markup(str(escape(label)).replace("+", "+<wbr>").replace("(", "<wbr>("))


def _chance(results: Sequence[Result], column: Column) -> str:
    """What a fair random router shows."""
    key = {"maxvio_global": "floor_global", "maxvio_local": "floor_local"}.get(column.key)
    if not results or key is None:
        return ""
    value = results[0].values[key]
    return "" if math.isnan(value) else format(value, column.form)


def _plain(value: Estimate, form: str) -> str:
    if value.n == 0:
        return "n/a"
    error = "" if math.isnan(value.error) else f" ± {format(value.error, form)}"
    return f"{format(value.mean, form)}{error}"


def _signed(value: Estimate, form: str) -> str:
    return _plain(value, f"+{form}").replace("± +", "± ")


def _write(path: Path, text: str) -> Path:
    write_atomic(path, text)
    return path
