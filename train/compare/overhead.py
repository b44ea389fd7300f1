"""How long a step takes with each method: beside the baseline, step by step in turn, so that a busy machine slows both."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...models import GPT
from ..config import Config
from ..data import Data, load_data
from ..files import write_atomic
from ..optim import make_optimizer
from ..runtime import choose_autocast, choose_device, seed_everything
from ..step import tolerate_nan, train_step
from .plan import Plan, Variant

OVERHEAD = "overhead.json"
WARM_UP = 2  # turns


@dataclass(frozen=True)
class Overhead:
    """Step time divided by the baseline's in the same turn."""

    median: float
    low: float  # first quartile
    high: float  # third
    turns: int


def measure_overhead(plan: Plan, say: Callable[[str], None]) -> dict[str, Overhead]:
    """{method: Overhead} of every method but the baseline's, each with the first of its swept settings.

    What was measured before is kept, in overhead.json; two models are in memory at a time.
    """
    path = plan.out / OVERHEAD
    turns, baseline = plan.config.compare.turns, plan.baseline.label
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known = {name: Overhead(**value) for name, value in kept.get(baseline, {}).items()}
    first = {variant.method: variant for variant in reversed(plan.variants) if variant.method != plan.baseline.method}
    missing = [method for method in plan.methods if method in first and method not in known]
    if turns == 0 or not missing:
        return known
    configs = {run.variant: run.config for run in reversed(plan.runs)}
    data = load_data(configs[plan.baseline], say=lambda line: None)
    for number, method in enumerate(missing, 1):
        say(f"timing {method} beside {baseline}, {turns} turns ({number} of {len(missing)})")
        known[method] = _measure(configs, plan.baseline, first[method], data, turns)
        write_atomic(path, json.dumps(kept | {baseline: {name: asdict(value) for name, value in known.items()}}) + "\n")
    return known


def _measure(configs: dict[Variant, Config], baseline: Variant, other: Variant, data: Data, turns: int) -> Overhead:
    steps = [_stepper(configs[variant], data) for variant in (baseline, other)]
    ratios = []
    for turn in range(WARM_UP + turns):
        # Who goes first alternates: the second finds warmer caches.
        order = (0, 1) if turn % 2 else (1, 0)
        seconds = {which: steps[which](turn) for which in order}
        if turn >= WARM_UP:
            ratios.append(seconds[1] / seconds[0])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if turns > 1 else ratios * 3
    return Overhead(statistics.median(ratios), low, high, turns)


def _stepper(config: Config, data: Data) -> Callable[[int], float]:
    """A model, and what takes its n-th step and returns the seconds that it took."""
    run = config.run
    device = choose_device(run.device)
    autocast = choose_autocast(run.precision, device)
    seed_everything(run.seed)
    model = GPT(config.model).to(device)
    model.set_activation_checkpointing(run.activation_checkpointing)
    if run.compile:
        model.compile_blocks()
    tolerate_nan(model)
    optimizer = make_optimizer(model, config.optim)

    def step(number: int) -> float:
        first = number * run.batch
        batches = [data.mixture.batch(first + at, run.microbatch) for at in range(0, run.batch, run.microbatch)]
        began = time.perf_counter()
        train_step(model, optimizer, batches, clip=config.optim.clip, autocast=autocast)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return step
