"""The runs of a comparison in TensorBoard's tab "HParams": what was set in each, and what came of it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

from .plan import Plan
from .results import Result

BOARD = "hparams"  # folder inside the comparison's
SHOWN = ("validation_loss", "maxvio_global", "maxvio_local", "intervention", "tokens_per_second")


def write_board(plan: Plan, results: Sequence[Result]) -> None:
    """Write the events anew. The curves are in the run folders: `tensorboard --logdir` of the comparison's folder has both."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    shutil.rmtree(plan.out / BOARD, ignore_errors=True)
    for result in results:
        variant = result.run.variant
        settings = {"balancers": variant.label, "seed": result.run.seed}
        settings |= {key: _plain(value) for key, value in variant.settings.items()}
        metrics = {f"result/{name}": result.values[name] for name in SHOWN if math.isfinite(result.values[name])}
        with SummaryWriter(str(plan.out / BOARD / result.run.folder.parent.name / result.run.folder.name)) as board:
            for summary in hparams(settings, metrics):
                board.file_writer.add_summary(summary)
            for name, value in metrics.items():
                board.add_scalar(name, value, result.run.config.run.steps)


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
