"""The grid of a comparison: which runs there are, where each has its folder, and the command that would train it alone."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...balancers import BALANCERS
from ..config import CompareConfig, Comparison, Config
from ..config_file import load_comparison, load_config
from ..errors import ConfigError, close_to
from ..layout import choose_layout
from ..runtime import choose_device

RUNS = "runs"  # folder of the runs, inside the comparison's
MOST_JOBS = 4  # runs at a time on a CPU, unless compare.jobs says otherwise
LONGEST_NAME = 80  # characters of a folder's name


@dataclass(frozen=True)
class Variant:
    """One balancer with one combination of the swept settings: what a row of the tables stands for."""

    label: str  # eqb+lei(coeff=0.1)
    method: str  # eqb+lei: what the variants of a sweep have in common
    settings: Mapping[str, Any] = field(hash=False)  # swept: {"lei.coeff": 0.1}
    overrides: tuple[str, ...]  # of the configuration


@dataclass(frozen=True)
class PlannedRun:
    """One training run of a comparison."""

    variant: Variant
    seed: int
    folder: Path
    config: Config = field(hash=False)
    command: str  # trains the same by itself

    @property
    def name(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """Every run of a comparison. Runs are ordered by seed, so that one that is stopped has whole seeds."""

    config: Comparison
    out: Path
    variants: tuple[Variant, ...]
    baseline: Variant
    jobs: int
    runs: tuple[PlannedRun, ...]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(variant.method for variant in self.variants))


def make_plan(name: str, overrides: Sequence[str] = ()) -> Plan:
    """The plan of `evenload compare NAME OVERRIDES`; keys of the section `compare` may be written without it.

    Raises ConfigError with one line for what cannot be compared; every run's configuration is checked.
    """
    keys = CompareConfig.__dataclass_fields__
    overrides = [f"compare.{text}" if text.partition("=")[0] in keys else text for text in overrides]
    config = load_comparison(name, overrides)
    chosen = config.compare
    if any(text.startswith("run.out=") for text in overrides):
        raise ConfigError("run.out: every run of a comparison has its own folder; name the comparison's with out=PATH")
    if any(text.startswith("run.seed=") for text in overrides):
        raise ConfigError("run.seed: name the seeds of a comparison with seeds=[0,1,2]")
    choose_layout(config.parallel, 1, config.model.num_experts)  # a run is one process
    if not chosen.seeds:
        raise ConfigError("compare.seeds = []: at least one seed is needed")
    for key in ("jobs", "turns"):
        if (value := getattr(chosen, key)) is not None and value < (lowest := 0 if key == "turns" else 1):
            raise ConfigError(f"compare.{key} = {value}: must be at least {lowest}")
    variants = tuple(_variants(chosen.balancers or ["none", "gshard", config.model.balancers], chosen.sweep))
    seeds = list(dict.fromkeys(chosen.seeds))
    out = Path(chosen.out or f"runs/compare-{Path(name).stem}").expanduser()
    jobs = chosen.jobs or _default_jobs(config, len(variants) * len(seeds))
    base = [text for text in overrides if not text.startswith("compare.")]
    if config.run.threads is None and choose_device(config.run.device).type == "cpu":
        base.append(f"run.threads={max(1, cores() // jobs)}")
    runs = []
    for seed, variant in itertools.product(seeds, variants):
        settings = [*base, *variant.overrides, f"run.seed={seed}"]
        folder = out / RUNS / _folder_name(variant.label) / f"seed-{seed}"
        run = load_config(name, [*settings, f"run.out={folder}"])
        runs.append(PlannedRun(variant, seed, folder, run, shlex.join(["evenload", "train", name, *settings])))
    return Plan(config, out, variants, _baseline(chosen.baseline, variants), jobs, tuple(runs))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_jobs(config: Config, runs: int) -> int:
    import torch

    if choose_device(config.run.device).type == "cuda":
        return min(runs, torch.cuda.device_count())
    return min(runs, cores(), MOST_JOBS)


def _baseline(label: str | None, variants: Sequence[Variant]) -> Variant:
    if label is None:
        return variants[0]
    for variant in variants:
        if label in (variant.label, variant.method):
            return variant
    labels = [variant.label for variant in variants]
    raise ConfigError(f"compare.baseline = {label!r}: not among those compared{close_to(label, labels)}: {', '.join(labels)}")


def _variants(specs: Sequence[Any], sweep: Mapping[str, Sequence[Any]]) -> list[Variant]:
    found: dict[tuple[str, ...], Variant] = {}
    used: set[str] = set()
    for spec in specs:
        items = _items(spec)
        names = [str(item["name"]) for item in items]
        here = {key: values for key, values in sweep.items() if _owner(key) in names or _owner(key) not in BALANCERS}
        used |= here.keys()
        for key, values in here.items():
            if not values:
                raise ConfigError(f"compare.sweep: {key}: [] has no values")
        for chosen in itertools.product(*here.values()):
            settings = dict(zip(here, chosen, strict=True))
            variant = _variant(items, settings)
            found.setdefault(variant.overrides, variant)
    for key in sweep:
        if key not in used:
            raise ConfigError(
                f"compare.sweep: {key}: no balancer of the comparison is {_owner(key)}; add one, such as {_owner(key)!r}"
            )
    return list(found.values())


def _variant(items: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Variant:
    swept = [dict(item) for item in items]
    others = {}
    for key, value in settings.items():
        owner, _, option = key.partition(".")
        if owner in BALANCERS:
            next(item for item in swept if item["name"] == owner)[option] = value
        else:
            others[key] = value
    label = " ".join([_label(swept), *(f"{key}={_yaml(value)}" for key, value in others.items())])
    overrides = [f"model.balancers={_spec(swept)}", *(f"{key}={_yaml(value)}" for key, value in others.items())]
    return Variant(label, _label(items), dict(settings), tuple(overrides))


def _items(spec: Any) -> list[Mapping[str, Any]]:
    """[{name: ..., option: ...}, ...] of what model.balancers may be."""
    if isinstance(spec, str):
        spec = [word.strip() for word in spec.split("+")]
    elif isinstance(spec, Mapping) or not isinstance(spec, Sequence):
        spec = [spec]
    items = [{"name": item} if isinstance(item, str) else item for item in spec]
    for item in items:
        if not isinstance(item, Mapping) or "name" not in item:
            raise ConfigError(
                f"compare.balancers: {item!r}: give a name such as eqb+lei, or a list of {{name: ..., option: ...}}"
            )
    return [item for item in items if item["name"] != "none"]


def _owner(key: str) -> str:
    owner, _, option = key.partition(".")
    known = [*BALANCERS, *Config.__dataclass_fields__]
    if owner not in known or not option:
        raise ConfigError(
            f"compare.sweep: {key}: write balancer.option or section.key, such as lei.coeff or optim.lr{close_to(owner, known)}"
        )
    return owner


def _label(items: Sequence[Mapping[str, Any]]) -> str:
    def one(item: Mapping[str, Any]) -> str:
        options = ",".join(f"{key}={_yaml(value)}" for key, value in item.items() if key != "name")
        return f"{item['name']}({options})" if options else str(item["name"])

    return "+".join(map(one, items)) or "none"


def _spec(items: Sequence[Mapping[str, Any]]) -> str:
    plain = all(len(item) == 1 for item in items)
    return _label(items) if plain else _yaml([dict(item) for item in items])


def _yaml(value: Any) -> str:
    """One line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("\n").removesuffix("\n...")


def _folder_name(label: str) -> str:
    name = re.sub(r"[^\w.+=,()-]+", "_", label)
    if name == label and len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
