"""A configuration as dataclasses: every option, its default and what it means. config_file.py reads them from a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..models import GPTConfig
from .errors import ConfigError, first_line


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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The configuration that `to_dict` was made of. Raises ConfigError."""
        try:
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))  # type: ignore[return-value]
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise ConfigError(f"not a configuration of this version: {first_line(error)}") from error

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


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, after) of every two-level key whose value differs."""
    return [
        (f"{section}.{key}", before.get(section, {}).get(key), value)
        for section, body in after.items()
        for key, value in body.items()
        if before.get(section, {}).get(key) != value
    ]
