"""The run's configuration: dataclasses, filled by OmegaConf from a YAML file and ``key=value`` overrides.

A configuration is a list of assignments to a structured tree. Each assignment remembers where it came from, so an
unknown key or a wrong type is refused by name, with its file and line (or its override) and what would have been right.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..balancers import make_balancers
from ..models import GPTConfig

CHOICES = {
    "data.mode": ("mixed", "domain"),
    "schedule.kind": ("cosine", "wsd", "constant"),
    "run.precision": ("auto", "fp32", "bf16"),
}
SOURCE_KINDS = ("stdlib", "text", "jsonl", "parquet", "hub")
AT_LEAST_ONE = (
    "run.steps",
    "run.seq_len",
    "run.microbatch",
    "run.accumulate",
    "run.log_every",
    "run.keep_last",
    "run.max_bad_steps",
)
AT_LEAST_ZERO = (
    "schedule.warmup",
    "schedule.min_ratio",
    "optim.weight_decay",
    "optim.clip",
    "run.eval_every",
    "run.save_every",
    "run.image_every",
)


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line: where, what, and what would be right."""


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
    tokenizer_bytes: int = 16_000_000  # text that the tokenizer is trained on, shared by the sources
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
class RunConfig:
    """How long, how large a step, and what is written where."""

    out: str | None = None  # run folder; default: runs/<name of the configuration>
    steps: int = 1000
    seq_len: int = 256  # tokens per sequence
    microbatch: int = 8  # sequences per microbatch
    accumulate: int = 1  # microbatches per optimizer step
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda | cuda:1 ...
    precision: str = "auto"  # auto: bf16 autocast on a GPU that has it, else fp32
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
    run: RunConfig = field(default_factory=RunConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of simple types."""
        return OmegaConf.to_container(OmegaConf.structured(self), resolve=True)  # type: ignore[return-value]

    def to_yaml(self) -> str:
        """The configuration as YAML that `evenload train` reads back to the same configuration."""
        return OmegaConf.to_yaml(OmegaConf.structured(self), resolve=True)


def packaged() -> list[str]:
    """Names of the configurations that ship with the library."""
    folder = importlib.resources.files(_configs_package())
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file (a path or a packaged name), apply ``key=value`` overrides, check it.

    Raises ConfigError with one line: the file and line or the override, the key, and what would be right.
    """
    origin, text = _read(name)
    tree = OmegaConf.structured(Config)
    origins: dict[str, str] = {}
    for where, key, value in [*_assignments_of_file(text, origin), *map(_assignment_of_override, overrides)]:
        _assign(tree, where, key, value)
        origins[_root(key)] = where
    try:
        config: Config = OmegaConf.to_object(tree)  # type: ignore[assignment]
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        named = [origins[key] for word in re.findall(r"\w+", str(error)) if (key := f"model.{word}") in origins]
        raise ConfigError(f"{', '.join(dict.fromkeys(named)) or origin}: model: {_first_line(error)}") from error
    if config.run.out is None:
        config.run.out = f"runs/{Path(name).stem}"
    validate(config, origins)
    return config


def validate(config: Config, origins: dict[str, str] | None = None) -> None:
    """Refuse what no run could use. `origins` maps keys to where they were set, for the message."""
    values = _flatten(config)

    def refuse(key: str, why: str) -> None:
        where = (origins or {}).get(key, "default")
        shown = "" if key == "data.sources" else f" = {values[key]!r}"  # a source is named by `why`
        raise ConfigError(f"{where}: {key}{shown}: {why}")

    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            refuse(key, f"use one of {', '.join(allowed)}{_close(values[key], allowed)}")
    for minimum, keys in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        for key in keys:
            if not values[key] >= minimum:
                refuse(key, f"must be at least {minimum}")
    for key in ("optim.lr", "optim.eps", "run.tail", "schedule.decay", "data.validation"):
        if not values[key] > 0:
            refuse(key, "must be above 0")
    for key in ("run.tail", "schedule.decay", "schedule.min_ratio"):
        if values[key] > 1:
            refuse(key, "is a share: at most 1")
    for key in ("optim.beta1", "optim.beta2"):
        if not 0 <= values[key] < 1:
            refuse(key, "must be at least 0 and below 1")
    if not config.data.validation < 1:
        refuse("data.validation", "is a share of the documents: must be below 1")
    if config.run.eval_tokens < config.run.seq_len:
        refuse("run.eval_tokens", f"must hold at least one sequence (run.seq_len = {config.run.seq_len})")
    if config.run.seq_len > config.model.max_seq_len:
        refuse("run.seq_len", f"longer than model.max_seq_len = {config.model.max_seq_len}")
    if config.model.vocab_size < 257 and config.data.tokenizer is None:
        refuse("model.vocab_size", "a byte-level vocabulary needs at least 257 (256 bytes and the end of text)")
    _validate_sources(config.data.sources, refuse)
    try:
        make_balancers(config.model.balancers)
    except (ValueError, TypeError, KeyError) as error:
        refuse("model.balancers", _first_line(error))


def _validate_sources(sources: list[SourceConfig], refuse: Any) -> None:
    if not sources:
        refuse("data.sources", "at least one source is needed")
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        refuse("data.sources", f"names must differ, got {', '.join(names)}")
    for source in sources:
        if not re.fullmatch(r"[\w.-]+", source.name):
            refuse("data.sources", f"name {source.name!r}: use letters, digits, '.', '_' and '-'")
        if source.kind not in SOURCE_KINDS:
            refuse("data.sources", f"{source.name}: kind {source.kind!r}: use one of {', '.join(SOURCE_KINDS)}")
        if source.sample_by not in ("document", "paragraph", "line"):
            refuse("data.sources", f"{source.name}: sample_by {source.sample_by!r}: use document, paragraph or line")
        if source.kind == "stdlib" and source.path not in ("code", "prose"):
            refuse("data.sources", f"{source.name}: stdlib path {source.path!r}: use code or prose")
        if not source.weight > 0:
            refuse("data.sources", f"{source.name}: weight {source.weight} must be above 0")
        if source.limit is not None and source.limit < 1:
            refuse("data.sources", f"{source.name}: limit {source.limit} must be at least 1")


def _configs_package() -> str:
    return f"{__package__.rpartition('.')[0]}.configs"


def _read(name: str) -> tuple[str, str]:
    """(where, text) of a configuration; a path wins over a packaged name."""
    path = Path(name)
    if path.is_file():
        return name, path.read_text(encoding="utf-8")
    if name in packaged():
        return f"{name}.yaml", (importlib.resources.files(_configs_package()) / f"{name}.yaml").read_text(encoding="utf-8")
    raise ConfigError(
        f"{name}: neither a file nor a packaged configuration ({', '.join(packaged())}){_close(name, packaged())}"
    )


def _assignments_of_file(text: str, origin: str) -> Iterator[tuple[str, str, Any]]:
    """(where, key, value) of every leaf of a two-level YAML file, `where` being file:line."""
    try:
        tree = OmegaConf.create(text)
        nodes = yaml.compose(text)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{line}: not valid YAML: {getattr(error, 'problem', None) or _first_line(error)}") from error
    if nodes is None:
        return
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{origin}: expected sections ({', '.join(_sections())}), found a list or a word")
    for section, body in nodes.value:
        where = f"{origin}:{section.start_mark.line + 1}"
        if section.value not in _sections():
            hint = _close(section.value, _sections()) or _close(section.value, _known_keys())
            raise ConfigError(f"{where}: unknown section {section.value!r}{hint}; sections: {', '.join(_sections())}")
        if not isinstance(body, yaml.MappingNode):
            raise ConfigError(f"{where}: section {section.value!r} must hold keys and values")
        for key, _ in body.value:
            value = OmegaConf.to_container(tree[section.value])[key.value]  # type: ignore[index]
            yield f"{origin}:{key.start_mark.line + 1}", f"{section.value}.{key.value}", value


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
    if root in _sections():
        raise ConfigError(
            f"{where}: {key!r} is a section; set one of its keys, for example {root}.{next(iter(tree[root]))}=..."
        )
    if root not in _known_keys():
        raise ConfigError(f"{where}: unknown key {key!r}{_close(root, _known_keys())}")
    parent = key.rpartition(".")[0]
    try:
        if OmegaConf.select(tree, parent) is None:
            raise ConfigError(f"{where}: there is no {parent}")
        OmegaConf.update(tree, key, value, merge=isinstance(value, list))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {key}: {_first_line(error)}{_close_in(error)}") from error


def _root(key: str) -> str:
    """section.key of a key that may go deeper, such as data.sources[0].weight."""
    return ".".join(re.split(r"[.\[]", key)[:2])


def _sections() -> list[str]:
    return list(Config.__dataclass_fields__)


def _known_keys() -> list[str]:
    tree = OmegaConf.structured(Config)
    return [f"{section}.{key}" for section in _sections() for key in tree[section]]


def _flatten(config: Config) -> dict[str, Any]:
    return {f"{s}.{key}": getattr(getattr(config, s), key) for s in _sections() for key in vars(getattr(config, s))}


def _close(word: Any, known: Sequence[str]) -> str:
    """' (did you mean ...?)' for a misspelt name; the last part of a dotted name also counts."""
    short = {name.rpartition(".")[2]: name for name in known}
    word = str(word)
    last = word.rpartition(".")[2]
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.75) or [
        short[name] for name in difflib.get_close_matches(last, short, n=1, cutoff=0.7)
    ]
    return f" (did you mean {found[0]}?)" if found else ""


def _close_in(error: OmegaConfBaseException) -> str:
    """A suggestion for an unknown key inside a structured value, such as one source."""
    if error.object_type is None or not hasattr(error.object_type, "__dataclass_fields__") or error.key is None:
        return ""
    names = list(error.object_type.__dataclass_fields__)
    return "" if error.key in names else f"{_close(error.key, names)}; keys: {', '.join(names)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].partition(" Did you mean")[0] if lines else type(error).__name__
