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
    from .eval_tasks import Evaluation, evaluate_tasks
    from .evaluation import Score, evaluate
    from .loop import Trainer
    from .mixture import Batch, Mixture
    from .optim import learning_rate, make_optimizer
    from .step import StepResult, train_step
    from .trained import Trained, load_trained

_HOME = {
    "Batch": "mixture",
    "Checkpoint": "checkpoint",
    "CheckpointError": "checkpoint",
    "Checkpointer": "checkpoint",
    "Config": "config",
    "ConfigError": "errors",
    "Data": "data",
    "Evaluation": "eval_tasks",
    "Mixture": "mixture",
    "Score": "evaluation",
    "StepResult": "step",
    "Trained": "trained",
    "Trainer": "loop",
    "TrainingStopped": "errors",
    "evaluate": "evaluation",
    "evaluate_tasks": "eval_tasks",
    "learning_rate": "optim",
    "load_config": "config_file",
    "load_data": "data",
    "load_trained": "trained",
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
    "Evaluation",
    "Mixture",
    "Score",
    "StepResult",
    "Trained",
    "Trainer",
    "TrainingStopped",
    "evaluate",
    "evaluate_tasks",
    "learning_rate",
    "load_config",
    "load_data",
    "load_trained",
    "make_optimizer",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
