"""What each balancer does to load and loss: same seed, same data, same tiny model, side by side.

    python benchmarks/balance.py                      # all methods, three seeds, one table (about 45 minutes on 2 cores)
    python benchmarks/balance.py --methods eqb qb --seeds 0 --steps 120

Every step has 8 microbatches, each from one domain (code or prose): the shards of a step do not look alike, which is what
tells the estimators apart. MaxVio is averaged over layers and over the steps after the first 75 (it spikes early in every
method). "floor" is the MaxVio that random routing shows on as many tokens. "residual" is the MaxVio of a step's own tokens
routed again with the bias that the step produced: the estimator alone, without staleness and sampling.
The overhead is measured separately, all methods taking turns, as the median ratio to "none" within a turn.
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from evenload.models import GPT
from evenload.train.config import Config, load_config
from evenload.train.data import load_data
from evenload.train.evaluation import evaluate
from evenload.train.optim import learning_rate, make_optimizer, set_learning_rate
from evenload.train.step import train_step

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, Any] = {
    "none": "none",
    "gshard 0.01": [{"name": "gshard", "coeff": 0.01}],
    "loss_free": "loss_free",
    "qb": "qb",
    "qb_histogram": "qb_histogram",
    "eqb": "eqb",
    "eqb+lei 0.1": [{"name": "eqb"}, {"name": "lei", "coeff": 0.1}],
    "eqb+gshard 0.1": [{"name": "eqb"}, {"name": "gshard", "coeff": 0.1}],
    "phi 0.1": [{"name": "phi", "coeff": 0.1, "eta": 0.6}],
    "phi 0.1 counts": [{"name": "phi", "coeff": 0.1, "eta": 0.6, "track": "counts"}],
}
BURN_IN = 75
MICROBATCHES = 8
METRICS = ("maxvio", "maxvio_local", "residual", "intervention", "floor", "floor_local")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--turns", type=int, default=25, help="turns of the overhead measurement, 0 leaves it out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS / "balance.json")
    arguments = parser.parse_args()
    if arguments.steps <= BURN_IN:
        sys.exit(f"--steps {arguments.steps}: the first {BURN_IN} steps are left out of the averages; use more")

    load_data(configuration("none", 0, arguments.steps))  # tokenizer and tokens are cached once, not by every job
    tasks = [(method, seed, arguments.steps) for seed in arguments.seeds for method in arguments.methods]
    rows = []
    with mp.get_context("spawn").Pool(arguments.jobs) as pool:
        began = time.monotonic()
        for row in pool.imap_unordered(train, tasks):
            rows.append(row)
            left = (time.monotonic() - began) / len(rows) * (len(tasks) - len(rows))
            print(
                f"[{len(rows)}/{len(tasks)}, {left / 60:.0f} min left] {row['method']}, seed {row['seed']}: "
                f"MaxVio {row['maxvio']:.3f}, local {row['maxvio_local']:.3f}, validation loss {row['loss']:.3f}",
                file=sys.stderr,
                flush=True,
            )
    overhead = measure_overhead(arguments.methods, arguments.turns) if arguments.turns else {}
    result = {"torch": torch.__version__, "steps": arguments.steps, "seeds": arguments.seeds, "rows": rows}
    result["overhead"] = overhead
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def configuration(method: str, seed: int, steps: int) -> Config:
    shape = ("run.microbatch=2", f"run.batch={2 * MICROBATCHES}", "data.mode=domain")
    config = load_config("tiny", (f"run.seed={seed}", f"run.steps={steps}", *shape))
    config.model.balancers = METHODS[method]
    return config


def train(task: tuple[str, int, int]) -> dict[str, Any]:
    """One run: method, seed, and the averages over its steps after the burn-in."""
    method, seed, steps = task
    torch.set_num_threads(1)
    config = configuration(method, seed, steps)
    config.model.measure_residual = True
    data = load_data(config, say=lambda _: None)
    torch.manual_seed(seed)
    model = GPT(config.model)
    optimizer = make_optimizer(model, config.optim)
    history: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate(step, steps, config.optim.lr, config.schedule))
        report = train_step(model, optimizer, microbatches(config, data, step), clip=config.optim.clip).report
        if report is None:
            raise RuntimeError(f"{method}, seed {seed}: non-finite loss or gradient at step {step}")
        if step >= BURN_IN:
            for metric in METRICS:
                history[metric].append(float(report.layers[metric].mean()))
    scores = evaluate(
        model, data.validation, data.tokenizer, seq_len=config.run.seq_len, max_tokens=config.run.eval_tokens, batch_size=8
    )
    averages = {metric: statistics.fmean(values) for metric, values in history.items()}
    return {"method": method, "seed": seed, "loss": statistics.fmean(s.loss for s in scores.values()), **averages}


def microbatches(config: Config, data: Any, step: int) -> list[Any]:
    size = config.run.microbatch
    return [data.mixture.batch((step * MICROBATCHES + i) * size, size) for i in range(MICROBATCHES)]


def measure_overhead(methods: list[str], turns: int) -> dict[str, float]:
    """{method: median over turns of its step time divided by that of "none" in the same turn}."""
    data, runs = None, {}
    for method in dict.fromkeys(["none", *methods]):
        config = configuration(method, 0, 260)
        data = data or load_data(config, say=lambda _: None)
        torch.manual_seed(0)
        model = GPT(config.model)
        runs[method] = (config, model, make_optimizer(model, config.optim))
    ratios: dict[str, list[float]] = {method: [] for method in runs}
    for turn in range(turns):
        seconds = {}
        for method, (config, model, optimizer) in runs.items():
            batches = microbatches(config, data, turn)
            start = time.perf_counter()
            train_step(model, optimizer, batches, clip=config.optim.clip)
            seconds[method] = time.perf_counter() - start
        if turn:  # the first turn warms up
            for method in runs:
                ratios[method].append(seconds[method] / seconds["none"])
    return {method: statistics.median(values) for method, values in ratios.items()}


def table(result: dict[str, Any]) -> str:
    """Mean over seeds, with the standard deviation over seeds behind it where there are several."""
    titles = ("validation loss", "global MaxVio", "local MaxVio", "residual", "overruled", "step time")
    lines = [f"{'method':<16}" + "".join(f"{title:>17}" for title in titles)]
    rows, methods = result["rows"], dict.fromkeys(row["method"] for row in sorted(result["rows"], key=_order))
    for method in methods:
        mine = [row for row in rows if row["method"] == method]
        cells = [_cell([row[m] for row in mine]) for m in ("loss", "maxvio", "maxvio_local", "residual", "intervention")]
        ratio = result["overhead"].get(method)
        cells.append("-" if ratio is None else f"{ratio:.2f}x")
        lines.append(f"{method:<16}" + "".join(f"{cell:>17}" for cell in cells))
    floor, local = rows[0]["floor"], rows[0]["floor_local"]
    lines.append(f"{'(random routing)':<16}{'':>17}{floor:>17.3f}{local:>17.3f}")
    lines.append(
        f"mean over seeds {result['seeds']} +- standard deviation; steps {BURN_IN} to {result['steps']}; "
        "loss in nats per token; step time relative to none"
    )
    return "\n".join(lines + expectations(rows))


def expectations(rows: list[dict[str, Any]]) -> list[str]:
    """What a throw-away experiment of other people's code showed, and whether it shows here too."""

    def ratios(metric: str, method: str, other: str) -> list[float]:
        of = {(row["method"], row["seed"]): row[metric] for row in rows}
        return [of[method, s] / of[other, s] for m, s in of if m == method and (other, s) in of]

    expected = [
        ("global MaxVio, eqb / qb", ratios("maxvio", "eqb", "qb"), 0.0, 1.0),
        ("residual, eqb / qb", ratios("residual", "eqb", "qb"), 0.0, 0.7),
        ("global MaxVio, eqb / qb_histogram", ratios("maxvio", "eqb", "qb_histogram"), 0.9, 1.1),
        ("global MaxVio, eqb / none", ratios("maxvio", "eqb", "none"), 0.0, 0.25),
        ("local MaxVio, eqb+lei 0.1 / eqb", ratios("maxvio_local", "eqb+lei 0.1", "eqb"), 0.0, 0.55),
    ]
    lines = []
    for name, values, low, high in expected:
        if values:
            verdict = "as expected" if all(low <= value <= high for value in values) else "NOT as expected"
            shown = " ".join(f"{value:.2f}" for value in values)
            lines.append(f"{name:<36} per seed: {shown:<18} expected {low:g} to {high:g}: {verdict}")
    return lines


def _order(row: dict[str, Any]) -> int:
    return list(METHODS).index(row["method"])


def _cell(values: list[float]) -> str:
    if any(math.isnan(value) for value in values):
        return "-"
    spread = f" +-{statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
