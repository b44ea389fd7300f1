"""A callback for transformers' Trainer: `balance_step` once per optimizer step, its metrics in the log, state on resume."""

import warnings
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...balancers import BalanceReport, balance_step
from .state import FILE, balancer_state, load_balancers


class BalanceCallback(TrainerCallback):
    """Trainer(model=balance(model, "eqb+lei"), ..., callbacks=[BalanceCallback()]).

    Logs `maxvio` and `maxvio_local` (means over layers, of the latest step) and the balancers' losses.

    Args:
        group: the ranks that hold distinct tokens, as in `balance_step`.

    Attributes:
        report: the latest BalanceReport; None before the first step.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.report: BalanceReport | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        """On resume, load what the Trainer leaves out: the balancers' state, and experts that the file names otherwise."""
        if state.global_step:
            restore(model, Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        """The same, where the Trainer goes back to its best checkpoint."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            restore(model, Path(state.best_model_checkpoint))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        self.report = balance_step(model, self.group)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.report is None or logs is None or "loss" not in logs:
            return
        shown = {name: float(self.report.layers[name].nanmean()) for name in ("maxvio", "maxvio_local")}
        shown |= {f"{name}_loss": float(values.nanmean()) for name, values in self.report.losses.items()}
        logs.update(shown)
        state.log_history[-1].update(shown)


def restore(model: nn.Module, folder: Path) -> None:
    """Load what the Trainer leaves out of a checkpoint that it has loaded. Warns where it is not there."""
    load_renamed_weights(model, folder)
    if (folder / FILE).is_file():
        load_balancers(model, folder)
    elif balancer_state(model):
        warnings.warn(
            f"the balancers go on without their state, as there is no {folder / FILE}; if the checkpoint is elsewhere, call "
            "load_balancers(model, folder) before trainer.train",
            stacklevel=3,
        )


def load_renamed_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint whose file calls them otherwise than the model.

    `save_pretrained` names the experts of most families as the hub does, one by one, and `from_pretrained` puts them
    together. The Trainer resumes by plain `load_state_dict` instead (transformers#48805): it warns of missing keys, and
    goes on with the experts that the model was initialised with.
    """
    saved: set[str] = set()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved.update(file.keys())
    if not saved or not isinstance(model, PreTrainedModel) or saved <= set(model.state_dict()):
        return
    stored = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(stored.state_dict(), strict=False)  # the balancers' keys are not in there
