"""The pictures of a comparison, as SVG and PNG that a page holds in itself. Narrow, so that a phone shows them at full size."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..monitor import read_layers, read_metrics, relative_load
from ..picture import smooth
from .plan import Plan, Variant
from .results import Result, Summary
from .statistics import pareto

# Okabe and Ito's palette without its yellow, which is too pale for a line, then black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # once the colours have been used
MARKERS = "osD^vP*X"
GREY = "#7F7F7F"
POINTS = 160  # of a curve
MOST_LINES = 7  # in one panel; more are split by method
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "evenload",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
SIZE = (5.0, 3.5)  # inches


def curves(plan: Plan, results: Sequence[Result], title: str, metric: str, floor: str) -> list[tuple[str, str]]:
    """[(what it shows, image)]: a balance metric over the steps, mean over layers and seeds.

    One panel of all variants; where they are too many, one of each method, its swept settings from light to dark.
    """
    variants = [variant for variant in plan.variants if any(result.run.variant is variant for result in results)]
    series = {variant: _series(results, variant, f"balance/{metric}/mean") for variant in variants}
    floors = _series(results, variants[0], f"balance/{floor}/mean")
    limits = _limits([*series.values(), floors])
    if len(variants) <= MOST_LINES:
        styles = {variant: _style(plan.methods.index(variant.method)) for variant in variants}
        if len({variant.method for variant in variants}) < len(variants):
            styles = {variant: _style(index) for index, variant in enumerate(variants)}
        return [(f"{title} over the steps", _panel(series, styles, floors, title, limits))]
    panels = []
    for method in plan.methods:
        mine = {variant: series[variant] for variant in variants if variant.method == method}
        shades = np.linspace(0.85, 0.05, len(mine)) if len(mine) > 1 else [0.3]
        styles = {variant: {"color": _cividis(shade), "linestyle": "-"} for variant, shade in zip(mine, shades, strict=True)}
        panels.append((f"{title} over the steps: {method}", _panel(mine, styles, floors, title, limits)))
    return panels


def scatter(plan: Plan, summaries: Mapping[str, Summary], column: str, title: str) -> tuple[str, str]:
    """(what it shows, image): validation loss against a balance measure, and the Pareto front of the means."""
    figure, axes = _figure()
    points = {
        variant: (summaries[variant.label].estimates[column], summaries[variant.label].estimates["validation_loss"])
        for variant in plan.variants
        if variant.label in summaries
    }
    for method in plan.methods:
        mine = {variant: point for variant, point in points.items() if variant.method == method}
        if not mine:
            continue
        style = _style(plan.methods.index(method))
        xs, ys = ([point[i].mean for point in mine.values()] for i in (0, 1))
        errors = [[0.0 if math.isnan(point[i].error) else point[i].error for point in mine.values()] for i in (0, 1)]
        marker = MARKERS[plan.methods.index(method) % len(MARKERS)]
        axes.errorbar(
            xs, ys, xerr=errors[0], yerr=errors[1], label=method, marker=marker, markersize=5, capsize=2, elinewidth=0.8,
            linewidth=0.9, **style,
        )  # fmt: skip
        for variant, x, y in zip(mine, xs, ys, strict=True):
            if variant.settings:
                text = ", ".join(
                    f"{value:g}" if isinstance(value, float) else str(value) for value in variant.settings.values()
                )
                axes.annotate(text, (x, y), (4, 4), textcoords="offset points", fontsize=7.5, color=style["color"])
    means = [(x.mean, y.mean) for x, y in points.values()]
    front = [means[index] for index in pareto(means)]
    if len(front) == 1:
        axes.plot(*front[0], "o", color=GREY, markersize=16, alpha=0.35, zorder=0, label="Pareto front: this one")
    elif front:
        axes.step(*zip(*front, strict=True), where="post", color=GREY, linewidth=5, alpha=0.35, zorder=0, label="Pareto front")
    _log_axis(axes.xaxis, axes.set_xscale)
    axes.set_xlabel(f"{title} (less is more even)")
    axes.set_ylabel("validation loss (nats per token)")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)
    return f"Validation loss against {title}", _svg(figure)


def heat_maps(plan: Plan, results: Sequence[Result]) -> list[tuple[str, str]]:
    """[(label, image)]: the load of each layer (row) and expert (column) over the last window of the variant's first seed."""
    images = []
    for variant in plan.variants:
        first = next((result for result in results if result.run.variant is variant), None)
        windows = read_layers(first.run.folder) if first else []
        if windows:
            images.append((variant.label, _pixels(relative_load(np.array(windows[-1]["load"])))))
    return images


def scale() -> str:
    """The colours of the heat maps, from no load to twice the fair share."""
    return _pixels(np.linspace(0, 2, 101)[None])


def _panel(
    series: Mapping[Variant, tuple[NDArray[np.int64], NDArray[np.float64]]],
    styles: Mapping[Variant, Mapping[str, Any]],
    floors: tuple[NDArray[np.int64], NDArray[np.float64]],
    title: str,
    limits: tuple[float, float] | None,
) -> str:
    figure, axes = _figure()
    for variant, (at, values) in series.items():
        values = smooth(values)
        axes.plot(*_thinned(at, values), linewidth=1.5, label=variant.label, **styles[variant])
    axes.plot(*_thinned(*floors), color=GREY, linestyle=":", linewidth=1.2, label="fair random router")
    _log_axis(axes.yaxis, axes.set_yscale)
    if limits:
        axes.set_ylim(*limits)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"{title} (busiest / fair share - 1)")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)
    return _svg(figure)


def _series(results: Sequence[Result], variant: Variant, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(steps, mean over the variant's seeds) of a key of the metrics, where every seed has it."""
    runs = [
        {line["step"]: line[key] for line in read_metrics(result.run.folder) if line.get(key) is not None}
        for result in results
        if result.run.variant is variant
    ]
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    return np.array(steps, dtype=np.int64), np.array([np.mean([run[step] for run in runs]) for step in steps])


def _thinned(at: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    keep = np.unique(np.linspace(0, len(at) - 1, min(len(at), POINTS)).round().astype(int)) if len(at) else slice(0)
    return at[keep], values[keep]


def _limits(series: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> tuple[float, float] | None:
    positive = np.concatenate([values[values > 0] for _, values in series])
    return (float(positive.min()) * 0.8, float(positive.max()) * 1.25) if len(positive) else None


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


def _cividis(shade: float) -> Any:
    from matplotlib import colormaps

    return colormaps["cividis"](shade)


def _log_axis(axis: Any, set_scale: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _figure() -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        FigureCanvasSVG(figure)
        return figure, figure.subplots()


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return _data_uri("image/svg+xml", text.getvalue().encode())


def _pixels(load: NDArray[np.float64]) -> str:
    from matplotlib.image import imsave

    content = io.BytesIO()
    imsave(content, load, cmap="PuOr_r", vmin=0, vmax=2, format="png")
    return _data_uri("image/png", content.getvalue())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
