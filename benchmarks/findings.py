"""The papers' claims, tested on the runs of `evenload compare findings`: what holds at our scale, and how surely.

    evenload compare findings                             # trains: about an hour on two idle cores
    python benchmarks/findings.py runs/findings           # reads its tables
    python benchmarks/findings.py docs/findings           # the tables that docs/findings.md speaks of

Differences are paired: each seed against the same seed, then mean +- standard error over seeds. A ratio is the exponential of
a mean difference of logarithms. "t" is the mean divided by its standard error; with three seeds, |t| > 4.3 is what chance alone
does in one of twenty tries. Loss is validation loss in nats per token, mean over the two domains.
"""

import argparse
import csv
import math
import sys
from pathlib import Path

import numpy as np

from evenload.train.compare.statistics import Estimate, estimate, paired

SWEPT = ("lei.coeff", "gshard.coeff", "phi.coeff", "loss_free.rate")
COLUMNS = ("validation_loss", "maxvio_global", "maxvio_local", "residual", "intervention")

Row = dict[str, str]
BySeed = dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/findings"), help="with results.csv and layers.csv")
    folder = parser.parse_args().folder
    runs, layers = (read(folder / name) for name in ("results.csv", "layers.csv"))
    print(
        "\n".join([*table(runs), "", *estimators(runs), "", *fronts(runs), "", *potentials(runs), "", *overruled(runs, layers)])
    )


def read(path: Path) -> list[Row]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        sys.exit(f"{path} is not there; make it with `evenload compare findings`")


def labels(runs: list[Row], method: str | None = None) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in runs if method in (None, row["method"])))


def values(runs: list[Row], label: str, column: str) -> BySeed:
    found = {int(row["seed"]): float(row[column]) for row in runs if row["label"] == label and row[column]}
    if not found and label not in labels(runs):
        sys.exit(f"no run of {label} in the table; there are {', '.join(labels(runs))}")
    return found


def table(runs: list[Row]) -> list[str]:
    width = max(map(len, labels(runs)))
    lines = [" " * width + "".join(f"{column.replace('_', ' '):>20}" for column in COLUMNS)]
    for label in labels(runs):
        cells = [show(estimate(list(values(runs, label, column).values()))) for column in COLUMNS]
        lines.append(f"{label:<{width}}" + "".join(f"{cell:>20}" for cell in cells))
    floors = {"maxvio_global": runs[0]["floor_global"], "maxvio_local": runs[0]["floor_local"]}
    lines.append(f"{'(fair random router)':<{width}}" + "".join(f"{floors.get(column, ''):>20.5}" for column in COLUMNS))
    seeds = sorted({int(row["seed"]) for row in runs})
    return [*lines, f"mean +- standard error over seeds {', '.join(map(str, seeds))}; {runs[0]['steps']} steps"]


def estimators(runs: list[Row]) -> list[str]:
    """EQB, whose quantile is exact, against the mean of the shards' quantiles and against a histogram of 1000 bins."""
    lines = ["1. exact quantile (eqb) against the shards' averaged quantiles (qb) and 1000 bins (qb_histogram)"]
    for column in ("maxvio_global", "residual"):
        for other in ("qb", "qb_histogram"):
            lines.append(
                ratio(f"{column.replace('_', ' ')}, eqb / {other}", values(runs, "eqb", column), values(runs, other, column))
            )
    lines += [difference(f"loss, eqb - {other}", runs, "eqb", other) for other in ("qb", "qb_histogram")]
    return lines


def fronts(runs: list[Row]) -> list[str]:
    """LEI against GShard on top of EQB: loss at the same local balance, and local balance at the same coefficient."""
    lei, gshard = labels(runs, "eqb+lei"), labels(runs, "eqb+gshard")
    lines = ["2. eqb+lei against eqb+gshard: local balance, and what it costs"]
    for label in (*lei, *gshard):
        lines.append(
            ratio(f"local MaxVio, {label} / eqb", values(runs, label, "maxvio_local"), values(runs, "eqb", "maxvio_local"))
        )
    lines += [difference(f"loss, {label} - eqb", runs, label, "eqb") for label in (*lei, *gshard)]
    for one in lei:
        other = one.replace("lei", "gshard")
        if other in gshard:
            balance = (values(runs, label, "maxvio_local") for label in (one, other))
            lines += [ratio(f"local MaxVio, {one} / {other}", *balance), difference(f"loss, {one} - {other}", runs, one, other)]
    return [*lines, *matched(runs, lei, gshard)]


def matched(runs: list[Row], lei: list[str], gshard: list[str]) -> list[str]:
    """Loss at the same local MaxVio, half-way of what both reach with the same seed, read off between coefficients."""
    differences = []
    for seed in values(runs, lei[0], "maxvio_local"):
        curves = [curve(runs, method, seed) for method in (lei, gshard)]
        low, high = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
        if low < high:
            ours, theirs = (float(np.interp((low + high) / 2, *zip(*points, strict=True))) for points in curves)
            differences.append(ours - theirs)
    found = estimate(differences)
    if not found.n:
        return ["  the two reach no local MaxVio in common with any seed: nothing can be said at matched balance"]
    return [shown("loss at the same local MaxVio, eqb+lei - eqb+gshard", found, "+.4f")]


def curve(runs: list[Row], method: list[str], seed: int) -> list[tuple[float, float]]:
    """[(log local MaxVio, loss)] of one seed over the coefficients, by the first."""
    found = [row for row in runs if row["label"] in method and int(row["seed"]) == seed]
    return sorted((math.log(float(row["maxvio_local"])), float(row["validation_loss"])) for row in found)


def potentials(runs: list[Row]) -> list[str]:
    """phi-balancing against the Switch loss (gshard, per microbatch) and the loss-free bias, each with its coefficients."""
    phi, others = labels(runs, "phi"), [*labels(runs, "gshard"), *labels(runs, "loss_free")]
    lines = ["3. phi against the Switch loss (gshard) and loss_free"]
    best = min(phi, key=lambda label: estimate(list(values(runs, label, "maxvio_global").values())).mean)
    for other in others:
        lines.append(
            ratio(f"global MaxVio, {best} / {other}", values(runs, best, "maxvio_global"), values(runs, other, "maxvio_global"))
        )
    lines += [difference(f"loss, {best} - {other}", runs, best, other) for other in others]
    return lines


def overruled(runs: list[Row], layers: list[Row]) -> list[str]:
    """How often the bias overrules the router, per layer."""
    biased = [label for label in labels(runs) if any(values(runs, label, "intervention"))]
    count = 1 + max(int(row["layer"]) for row in layers)
    width = max(map(len, biased))
    lines = [
        "4. intervention rate per layer, percent of the choices",
        f"  {'':<{width}}" + "".join(f"{layer:>14}" for layer in range(count)),
    ]
    for label in biased:
        cells = []
        for layer in range(count):
            mine = [float(row["intervention"]) for row in layers if row["label"] == label and int(row["layer"]) == layer]
            found = estimate([100 * value for value in mine])
            cells.append(f"{found.mean:.1f} +-{found.error:.1f}")
        lines.append(f"  {label:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def ratio(name: str, values: BySeed, others: BySeed) -> str:
    logs = [{seed: math.log(value) for seed, value in of.items()} for of in (values, others)]
    found = paired(*logs)
    low, high = (math.exp(found.mean + sign * found.error) for sign in (-1, 1))
    return f"  {name:<56} {math.exp(found.mean):.3f} ({low:.3f} to {high:.3f}){tail(found)}"


def difference(name: str, runs: list[Row], label: str, other: str) -> str:
    return shown(name, paired(values(runs, label, "validation_loss"), values(runs, other, "validation_loss")), "+.4f")


def shown(name: str, found: Estimate, form: str) -> str:
    return f"  {name:<56} {found.mean:{form}} +-{found.error:.4f}{tail(found)}"


def tail(found: Estimate) -> str:
    return f"   t {found.mean / found.error:+.1f}, n {found.n}" if found.error else ""


def show(found: Estimate) -> str:
    return f"{found.mean:.3f} +-{found.error:.3f}" if found.n else "-"


if __name__ == "__main__":
    main()
