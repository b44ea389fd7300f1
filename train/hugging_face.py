"""`evenload export RUN hf` and `evenload import FOLDER`: our models in transformers' format, and theirs in ours."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
from pathlib import Path
from typing import Any

from torch import Tensor

from ..models import GPTConfig
from .errors import ConfigError, first_line
from .files import folder_atomic

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def write_hf(folder: Path, model: dict[str, Any], state: dict[str, Tensor], tokenizer: Path) -> None:
    """Write what stock `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Args:
        model: the section of that name in the run's configuration.
        state: the model's whole state dict.
        tokenizer: the run's tokenizer.json; left out where there is none.

    Raises ConfigError naming the option that no stock architecture can express.
    """
    hf = _hugging_face("export")
    try:
        hf.save_hf(folder, GPTConfig(**model), state, tokenizer if tokenizer.is_file() else None)
    except ValueError as error:
        raise ConfigError(f"export: {error}") from error


def import_hf(source: Path, out: Path, balancers: Any = None) -> Path:
    """Write a stock model as `evenload export RUN safetensors` would write ours, and return the folder, `out`.

    Args:
        source: the folder of a transformers model.
        out: a folder that is not there yet.
        balancers: as in GPTConfig; None = those that the model was exported or is known to be trained with.

    Raises ConfigError for what cannot be read, expressed or written.
    """
    hf = _hugging_face("import")
    if out.exists():
        raise ConfigError(f"import: {out} exists; remove it or choose another out=PATH")
    try:
        config, state, tokenizer = hf.load_hf(source, balancers)
    except (ValueError, OSError) as error:
        raise ConfigError(f"import: {first_line(error)}") from error
    from safetensors.torch import save_file

    about = {"model": dataclasses.asdict(config)}
    try:
        with folder_atomic(out) as aside:
            weights = {name: value.contiguous() for name, value in state.items()}
            save_file(weights, aside / WEIGHTS, {"format": "pt", "step": "0", "config": json.dumps(about)})
            (aside / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            if tokenizer is not None:
                shutil.copyfile(tokenizer, aside / TOKENIZER)
    except OSError as error:
        raise ConfigError(f"import: {out} cannot be written: {first_line(error)}") from error
    return out


def _hugging_face(command: str) -> types.ModuleType:
    """models.hf, without its progress bars."""
    try:
        from transformers.utils import logging

        from ..models import hf
    except ImportError as error:
        raise ConfigError(f"{command}: {first_line(error)}; pip install 'evenload[hf]'") from error
    logging.disable_progress_bar()
    return hf
