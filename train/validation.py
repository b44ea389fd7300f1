"""What no run could use, refused by key before anything is read or built."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

import torch

from ..balancers import Router
from ..models import ACTIVATION_CHECKPOINTING, GPTConfig
from .config import Config, SourceConfig
from .errors import ConfigError, close_to, first_line

CHOICES = {
    "data.mode": ("mixed", "domain"),
    "schedule.kind": ("cosine", "wsd", "constant"),
    "run.precision": ("auto", "fp32", "bf16"),
    "run.activation_checkpointing": ACTIVATION_CHECKPOINTING,
}
SOURCE_KINDS = ("stdlib", "text", "jsonl", "parquet", "hub")
AT_LEAST_ONE = (
    "run.steps",
    "run.seq_len",
    "run.microbatch",
    "run.batch",
    "run.log_every",
    "run.keep_last",
    "run.max_bad_steps",
    "data.tokenizer_bytes",
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
# Options that the router's message names when their value is wrong; anything else concerns the balancers.
ROUTER_KEYS = ("score", "num_groups", "group_top_k", "top_k")


def validate(config: Config, origins: dict[str, str] | None = None) -> None:
    """Refuse what no run could use. `origins` maps keys to where they were set, for the message."""
    values = {f"{s}.{key}": value for s, section in vars(config).items() for key, value in vars(section).items()}

    def refuse(key: str, why: str) -> None:
        where = (origins or {}).get(key, "default")
        shown = "" if key == "data.sources" else f" = {values[key]!r}"  # a source is named by `why`
        raise ConfigError(f"{where}: {key}{shown}: {why}")

    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            refuse(key, f"use one of {', '.join(allowed)}{close_to(values[key], allowed)}")
    for minimum, keys in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        for key in keys:
            if not values[key] >= minimum:
                refuse(key, f"must be at least {minimum}")
    for key in ("optim.lr", "optim.eps", "run.tail", "schedule.decay", "data.validation", "parallel.timeout"):
        if not values[key] > 0:
            refuse(key, "must be above 0")
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(key, "must be a finite number")
    for key in ("run.tail", "schedule.decay", "schedule.min_ratio"):
        if values[key] > 1:
            refuse(key, "is a share: at most 1")
    for key in ("optim.beta1", "optim.beta2"):
        if not 0 <= values[key] < 1:
            refuse(key, "must be at least 0 and below 1")
    if not config.data.validation < 1:
        refuse("data.validation", "is a share of the documents: must be below 1")
    if config.run.threads is not None and config.run.threads < 1:
        refuse("run.threads", "must be at least 1, or null for torch's own choice")
    if not 0 <= config.run.seed < 2**32:
        refuse("run.seed", "must be at least 0 and below 2**32")
    if config.run.out is not None and (file := _file_on(Path(config.run.out).expanduser())):
        refuse("run.out", f"{file} is a file; name a folder")
    if config.run.compile and config.run.activation_checkpointing == "selective":
        refuse("run.activation_checkpointing", "compiled blocks hide what it would have to see; use none or full")
    if config.run.batch % config.run.microbatch:
        refuse("run.batch", f"must be a multiple of run.microbatch = {config.run.microbatch}")
    if config.run.eval_tokens < config.run.seq_len:
        refuse("run.eval_tokens", f"must hold at least one sequence (run.seq_len = {config.run.seq_len})")
    if config.run.seq_len > config.model.max_seq_len:
        refuse("run.seq_len", f"longer than model.max_seq_len = {config.model.max_seq_len}")
    if config.model.vocab_size < 257 and config.data.tokenizer is None:
        refuse("model.vocab_size", "a byte-level vocabulary needs at least 257 (256 bytes and the end of text)")
    if config.model.num_dense_layers == config.model.num_layers:
        refuse("model.num_dense_layers", f"leaves none of the {config.model.num_layers} layers to experts; use fewer")
    _validate_sources(config.data.sources, refuse)
    _validate_router(config.model, refuse)


def _validate_router(model: GPTConfig, refuse: Any) -> None:
    """Build the router once: what it refuses would otherwise be known only after the data is prepared."""
    try:
        with torch.device("meta"):
            Router(
                None,
                model.num_experts,
                model.top_k,
                balancers=model.balancers,
                score=cast(Any, model.score),  # the router checks it
                num_groups=model.num_groups,
                group_top_k=model.group_top_k,
            )
    except (ValueError, TypeError, KeyError) as error:
        why = first_line(error)
        named = (key for key in ROUTER_KEYS if f"{key}=" in why and getattr(model, key) is not None)
        refuse(f"model.{next(named, 'balancers')}", why)


def _file_on(path: Path) -> Path | None:
    """The part of a path that is a file where a folder is needed, if there is one."""
    return next((part for part in (path, *path.parents) if part.is_file()), None)


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
        if not 0 < source.weight < math.inf:
            refuse("data.sources", f"{source.name}: weight {source.weight} must be above 0 and finite")
        if source.limit is not None and source.limit < 1:
            refuse("data.sources", f"{source.name}: limit {source.limit} must be at least 1")
