"""The state of the balancers behind a model's gates, in a file of its own beside the model's."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..behind import ROUTER

FILE = "evenload.safetensors"


def balancer_state(model: nn.Module) -> dict[str, Tensor]:
    """{key: tensor} of everything in the state dict that `balance` has added, such as biases."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        if name.endswith(f".{ROUTER}")
        for key, value in module.state_dict().items()
    }


def save_balancers(model: nn.Module, folder: str | os.PathLike[str]) -> Path | None:
    """Write the balancers' state into `folder`; returns the file, or None where they have none (such as "lei").

    A balanced model's `save_pretrained` does this.
    """
    state = balancer_state(model)
    path = Path(folder) / FILE
    if not state:
        path.unlink(missing_ok=True)  # of an earlier save with other balancers
        return None
    save_file({key: value.detach().contiguous().cpu() for key, value in state.items()}, path)
    return path


@torch.no_grad()
def load_balancers(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load what `save_balancers` wrote into a model that is balanced with the same balancers.

    Raises:
        ValueError: if there is no such file, or it belongs to other balancers or another model.
    """
    path = Path(folder) / FILE
    state = balancer_state(model)
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; it is written by save_pretrained of a balanced model whose balancers have state"
        )
    saved = load_file(path)
    wrong = [key for key in {**state, **saved} if key not in state or key not in saved or state[key].shape != saved[key].shape]
    if wrong:
        raise ValueError(
            f"{path} does not fit this model and its balancers: {wrong[0]} (balance it with those it was saved with)"
        )
    for key, value in state.items():
        value.copy_(saved[key])
