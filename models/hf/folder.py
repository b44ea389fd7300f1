"""A GPT-MoE as a folder that stock `AutoModelForCausalLM.from_pretrained` loads, and back."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from ..config import GPTConfig
from .convert import from_hf, gpt_config, to_hf

END_OF_TEXT = "<|endoftext|>"
TOKENIZER = "tokenizer.json"


def save_hf(
    folder: str | os.PathLike[str], config: GPTConfig, state: dict[str, Tensor], tokenizer: str | os.PathLike[str] | None = None
) -> None:
    """Write weights, configuration and tokenizer in transformers' format; no remote code is needed to load them.

    Args:
        folder: made if it is not there.
        config, state: of a GPT; `state` is its whole state dict.
        tokenizer: a tokenizer.json that goes with it; its end-of-text token ends a generation.

    Raises:
        ValueError: naming the option that no stock architecture can express.
    """
    theirs, converted = to_hf(config, state)
    end = None
    if tokenizer is not None:
        backend = Tokenizer.from_file(os.fspath(tokenizer))
        end = backend.token_to_id(END_OF_TEXT)
        special = {} if end is None else {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
        wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=config.max_seq_len, **special)
        wrapped.save_pretrained(folder)
    theirs.eos_token_id = theirs.bos_token_id = end
    with torch.device("meta"), _without_a_word_on_empty_tensors():
        model = AutoModelForCausalLM.from_config(theirs, dtype=converted["model.embed_tokens.weight"].dtype)
    model.load_state_dict(converted, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=end, bos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)


def load_hf(folder: str | os.PathLike[str], balancers: Any = None) -> tuple[GPTConfig, dict[str, Tensor], Path | None]:
    """(config, float32 state dict, tokenizer.json or None) of a stock model in a local folder, for a GPT.

    Args:
        balancers: as in `from_hf`.

    Raises:
        ValueError: if there is no model, or it is one that a GPT cannot express.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json there; give the folder of a transformers model")
    theirs = AutoConfig.from_pretrained(path, local_files_only=True)
    gpt_config(theirs, balancers)  # refuse before reading the weights
    with _without_a_word_on_empty_tensors():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    config, state = from_hf(model.config, dict(model.state_dict()), balancers)
    tokenizer = path / TOKENIZER
    return config, state, tokenizer if tokenizer.is_file() else None


@contextmanager
def _without_a_word_on_empty_tensors() -> Iterator[None]:
    """A model without shared experts has shared experts of width 0 there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield
