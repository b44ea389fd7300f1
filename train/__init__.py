"""Pretraining: configuration, data, the loop, checkpoints, monitoring, evaluation and the command line.

    config = load_config("tiny", ["run.steps=50"])
    Trainer(config).run()

Names are imported at their first use, so that the command line answers without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, Checkpointer, CheckpointError
    from .config import Config
    from .config_file import load_config
    from .data import Data, load_data
    from .errors import ConfigError, TrainingStopped
    from .evaluation import Score, evaluate
    from .loop import Trainer
    from .mixture import Batch, Mixture
    from .optim import learning_rate, make_optimizer
    from .step import StepResult, train_step

_HOME = {
    "Batch": "mixture",
    "Checkpoint": "checkpoint",
    "CheckpointError": "checkpoint",
    "Checkpointer": "checkpoint",
    "Config": "config",
    "ConfigError": "errors",
    "Data": "data",
    "Mixture": "mixture",
    "Score": "evaluation",
    "StepResult": "step",
    "Trainer": "loop",
    "TrainingStopped": "errors",
    "evaluate": "evaluation",
    "learning_rate": "optim",
    "load_config": "config_file",
    "load_data": "data",
    "make_optimizer": "optim",
    "train_step": "step",
}

__all__ = [
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "Config",
    "ConfigError",
    "Data",
    "Mixture",
    "Score",
    "StepResult",
    "Trainer",
    "TrainingStopped",
    "evaluate",
    "learning_rate",
    "load_config",
    "load_data",
    "make_optimizer",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
