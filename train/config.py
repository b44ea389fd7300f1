"""The run's configuration: dataclasses, filled by OmegaConf from a YAML file and ``key=value`` overrides.

A configuration is a list of assignments to a structured tree. Each assignment remembers where it came from, so an
unknown key or a wrong type is refused by name, with its file and line (or its override) and what would have been right.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..models import GPTConfig
from .errors import ConfigError, close_to, first_line
from .validation import validate


@dataclass
class SourceConfig:
    """One domain of text."""

    name: str = MISSING  # names the domain in logs and tables
    kind: str = "stdlib"  # stdlib | text | jsonl | parquet | hub
    path: str = MISSING  # stdlib: code or prose; files: a path or a glob; hub: the data set's name
    weight: float = 1.0  # share of the training sequences, relative to the other sources
    field: str = "text"  # column that holds the text
    subset: str | None = None  # hub: configuration of the data set
    split: str = "train"  # hub: split of the data set
    sample_by: str = "document"  # text files: one document per document (file), paragraph or line
    limit: int | None = None  # at most this many documents


def _stdlib_sources() -> list[SourceConfig]:
    return [SourceConfig("code", "stdlib", "code", 0.5), SourceConfig("prose", "stdlib", "prose", 0.5)]


@dataclass
class DataConfig:
    """What is read, how it is split and mixed."""

    sources: list[SourceConfig] = field(default_factory=_stdlib_sources)
    mode: str = "mixed"  # mixed: domains mix within a microbatch; domain: each microbatch comes from one domain
    validation: float = 0.03  # share of the documents held out
    tokenizer: str | None = None  # a byte-level BPE tokenizer.json; by default one of model.vocab_size is trained and cached
    tokenizer_bytes: int = 16_000_000  # characters of text that the tokenizer is trained on, shared by the sources
    cache: str | None = None  # default: $EVENLOAD_CACHE, else ~/.cache/evenload


@dataclass
class OptimConfig:
    """AdamW."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only: never on norms, biases and router gates
    decay_embeddings: bool = False
    clip: float = 1.0  # largest gradient norm; 0 = no clipping


@dataclass
class ScheduleConfig:
    """Learning rate over the steps."""

    kind: str = "cosine"  # cosine | wsd (warm-up, stable, decay) | constant
    warmup: int = 100  # steps
    min_ratio: float = 0.1  # the last learning rate divided by the largest
    decay: float = 0.2  # wsd: share of the steps that decay


@dataclass
class ParallelConfig:
    """How the ranks of a run share the model. -1 takes what the other numbers leave; see train/layout.py."""

    dp_replicate: int = 1  # copies of the sharded model (HSDP when above 1)
    dp_shard: int = -1  # ranks that share one copy (FSDP)
    ep: int = 1  # ranks of those among which the experts are split; divides dp_shard and model.num_experts
    timeout: float = 600.0  # seconds that a rank may leave the others waiting before the job ends


@dataclass
class RunConfig:
    """How long, how large a step, and what is written where."""

    out: str | None = None  # run folder; default: runs/<name of the configuration>
    steps: int = 1000
    seq_len: int = 256  # tokens per sequence
    batch: int = 8  # sequences per optimizer step, over all ranks: the same config means the same training on any number
    microbatch: int = 8  # sequences per forward on one rank; batch / (microbatch * ranks) of them are accumulated
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda | cuda:1 ...
    precision: str = "auto"  # auto: bf16 autocast on a GPU that has it, else fp32
    activation_checkpointing: str = "none"  # none | selective: keep matrix products and routing | full: recompute each block
    compile: bool = False  # torch.compile of the blocks
    threads: int | None = None  # CPU threads of torch
    resume: str = "auto"  # auto: continue from the newest good checkpoint; never; or a checkpoint's path
    log_every: int = 1  # steps, as are all intervals
    eval_every: int = 200  # 0 = only at the end; so too for the others below
    eval_tokens: int = 65_536  # validation tokens per domain
    save_every: int = 200
    keep_last: int = 2  # checkpoints
    image_every: int = 100  # layer x expert load heat map
    max_bad_steps: int = 10  # steps in a row with a non-finite loss or gradient before the run stops
    tail: float = 0.25  # the summary averages over this last part of the steps


@dataclass
class Config:
    """Everything that `evenload train` needs."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of simple types."""
        return OmegaConf.to_container(OmegaConf.structured(self), resolve=True)  # type: ignore[return-value]

    def to_yaml(self) -> str:
        """The configuration as YAML that `evenload train` reads back to the same configuration."""
        return OmegaConf.to_yaml(OmegaConf.structured(self), resolve=True)


@dataclass
class CompareConfig:
    """What `evenload compare` varies, and how it runs."""

    balancers: list[Any] = field(default_factory=list)  # as model.balancers, each; default: none, gshard, model.balancers
    seeds: list[int] = field(default_factory=lambda: [0])  # each is an initialisation and an order of the data, for all alike
    sweep: dict[str, list[Any]] = field(default_factory=dict)  # balancer.option or section.key: values; every combination
    baseline: str | None = None  # what the others are compared with, as the tables name it; default: the first
    out: str | None = None  # folder; default: runs/compare-<name of the configuration>
    jobs: int | None = None  # runs at a time; default: one per GPU, or one per CPU core and at most 4
    turns: int = 10  # steps of the side-by-side timing of each method and the baseline; 0 leaves it out


@dataclass
class Comparison(Config):
    """Everything that `evenload compare` needs: a run's configuration and what varies. `evenload train` leaves that aside."""

    compare: CompareConfig = field(default_factory=CompareConfig)


C = TypeVar("C", bound=Config)


def packaged() -> list[str]:
    """Names of the configurations that ship with the library."""
    folder = importlib.resources.files(_configs_package())
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file (a path or a packaged name), apply ``key=value`` overrides, check it.

    Raises ConfigError with one line: the file and line or the override, the key, and what would be right.
    """
    return _load(name, overrides, Config)


def load_comparison(name: str, overrides: Sequence[str] = ()) -> Comparison:
    """The same, for `evenload compare`: with a section `compare`."""
    return _load(name, overrides, Comparison)


def _load(name: str, overrides: Sequence[str], schema: type[C]) -> C:
    origin, text = _read(name)
    tree = OmegaConf.structured(schema)
    origins: dict[str, str] = {}
    assignments = _assignments_of_file(text, origin, tree)
    for where, key, value in [*assignments, *map(_assignment_of_override, overrides)]:
        _assign(tree, where, key, value)
        origins[_root(key)] = where
    try:
        config: C = OmegaConf.to_object(tree)  # type: ignore[assignment]
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        named = [origins[key] for word in re.findall(r"\w+", str(error)) if (key := f"model.{word}") in origins]
        key = getattr(error, "full_key", None) or "model"  # the model checks itself; all else is OmegaConf's
        named += [origins[root] for root in (_root(key),) if root in origins]
        raise ConfigError(f"{', '.join(dict.fromkeys(named)) or origin}: {key}: {first_line(error)}") from error
    if config.run.out is None:
        config.run.out = f"runs/{Path(name).stem}"
    validate(config, origins)
    return config


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, after) of every two-level key whose value differs."""
    return [
        (f"{section}.{key}", before.get(section, {}).get(key), value)
        for section, body in after.items()
        for key, value in body.items()
        if before.get(section, {}).get(key) != value
    ]


def _configs_package() -> str:
    return f"{__package__.rpartition('.')[0]}.configs"


def _read(name: str) -> tuple[str, str]:
    """(where, text) of a configuration; a path wins over a packaged name."""
    path = Path(name)
    if path.is_file():
        try:
            return name, path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{name}: cannot be read as UTF-8 text: {first_line(error)}") from error
    if name in packaged():
        return f"{name}.yaml", (importlib.resources.files(_configs_package()) / f"{name}.yaml").read_text(encoding="utf-8")
    raise ConfigError(
        f"{name}: neither a file nor a packaged configuration ({', '.join(packaged())}){close_to(name, packaged())}"
    )


def _assignments_of_file(text: str, origin: str, schema: DictConfig) -> Iterator[tuple[str, str, Any]]:
    """(where, key, value) of every leaf of a two-level YAML file, `where` being file:line."""
    try:
        nodes = yaml.compose(text)
        if nodes is None:
            return
        if not isinstance(nodes, yaml.MappingNode):
            raise ConfigError(f"{origin}: expected sections ({', '.join(map(str, schema))}), found a list or a word")
        content = cast(DictConfig, OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{line}: not valid YAML: {getattr(error, 'problem', None) or first_line(error)}") from error
    for section, body in nodes.value:
        where = f"{origin}:{section.start_mark.line + 1}"
        if section.value not in schema:
            if section.value in Comparison.__dataclass_fields__:
                continue
            hint = close_to(section.value, list(schema)) or close_to(section.value, _known_keys(schema))
            raise ConfigError(f"{where}: unknown section {section.value!r}{hint}; sections: {', '.join(map(str, schema))}")
        if not isinstance(body, yaml.MappingNode):
            raise ConfigError(f"{where}: section {section.value!r} must hold keys and values")
        values = cast(dict[Any, Any], OmegaConf.to_container(content[section.value]))
        for key, _ in body.value:
            where = f"{origin}:{key.start_mark.line + 1}"
            if key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(f"{where}: {key.value!r} in section {section.value!r}: keys are plain words, without <<")
            yield where, f"{section.value}.{key.value}", values[key.value]


def _assignment_of_override(text: str) -> tuple[str, str, Any]:
    where = f"override {text!r}"
    key, equals, _ = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{where}: write it as key=value, for example run.steps=200")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text[len(key) + 1 :]}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{where}: the value is not valid YAML") from error
    return where, key, parsed["value"]  # type: ignore[index,call-overload]


def _assign(tree: DictConfig, where: str, key: str, value: Any) -> None:
    root = _root(key)
    if root in tree:
        raise ConfigError(
            f"{where}: {key!r} is a section; set one of its keys, for example {root}.{next(iter(tree[root]))}=..."
        )
    if root not in (known := _known_keys(tree)):
        raise ConfigError(f"{where}: unknown key {key!r}{close_to(root, known)}")
    parent = key.rpartition(".")[0]
    try:
        if OmegaConf.select(tree, parent) is None:
            raise ConfigError(f"{where}: there is no {parent}")
        OmegaConf.update(tree, key, value, merge=isinstance(value, list))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {key}: {first_line(error)}{_close_in(error)}") from error
    except ConfigError:
        raise
    except ValueError as error:  # how OmegaConf says that a list has no names
        raise ConfigError(f"{where}: {key}: {parent} is a list; write {parent}[0].{key.rpartition('.')[2]}=...") from error


def _root(key: str) -> str:
    """section.key of a key that may go deeper, such as data.sources[0].weight."""
    return ".".join(re.split(r"[.\[]", key)[:2])


def _known_keys(schema: DictConfig) -> list[str]:
    return [f"{section!s}.{key!s}" for section in schema for key in schema[section]]


def _close_in(error: OmegaConfBaseException) -> str:
    """A suggestion for an unknown key inside a structured value, such as one source."""
    if error.object_type is None or not hasattr(error.object_type, "__dataclass_fields__") or error.key is None:
        return ""
    names = list(error.object_type.__dataclass_fields__)
    return "" if error.key in names else f"{close_to(error.key, names)}; keys: {', '.join(names)}"
