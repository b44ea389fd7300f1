"""A run's checkpoint as a model to use, with its tokenizer and the configuration it was trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models import GPT
from .checkpoint import read_model
from .config import Config
from .errors import ConfigError, first_line
from .export import TOKENIZER, find_checkpoint, run_folder
from .tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Trained:
    """A model in eval mode, and where it comes from."""

    model: GPT
    tokenizer: TextTokenizer
    config: Config
    step: int
    folder: Path  # of the run
    checkpoint: Path


def load_trained(source: Path, device: torch.device, say: Callable[[str], None] = print) -> Trained:
    """The newest whole checkpoint of the run `source`, or the checkpoint `source` itself.

    Raises ConfigError and CheckpointError.
    """
    checkpoint = find_checkpoint(source, say, "eval")
    config = Config.from_dict(checkpoint.extra["config"])
    model = GPT(config.model)
    try:
        model.load_state_dict(read_model(checkpoint))
    except RuntimeError as error:  # names or shapes; torch lists them on further lines
        raise ConfigError(f"eval: {checkpoint.path} does not fit its own configuration: {first_line(error)}") from error
    folder = run_folder(checkpoint)
    if not (folder / TOKENIZER).is_file():
        raise ConfigError(f"eval: {folder} has no {TOKENIZER}; leave a checkpoint in its run's folder")
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    return Trained(model.to(device).eval(), tokenizer, config, checkpoint.step, folder, checkpoint.path)
