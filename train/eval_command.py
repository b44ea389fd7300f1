"""`evenload eval`: a checkpoint on tasks of lm-evaluation-harness, with the load of its experts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .eval_tasks import Evaluation, Metric, TaskScore

EVAL_HELP = """\
tasks:
  bits_per_byte_SOURCE    the held-out documents of a source of the run's corpus
  continuation_SOURCE     which of four passages continues a held-out document: a guess is right in 25 %
  any other               lm-eval's own, such as hellaswag; their data comes from the hub

options:
  tasks=[A, B]            default: the run's own
  limit=N                 at most N documents per task
  batch=N                 rows per forward, default 8
  device=auto             auto, cpu, cuda or cuda:<number>
  precision=fp32          fp32, bf16 (autocast), or auto as in training
  against=hf              the same through `evenload export RUN hf` and lm-eval's hf model, side by side

The table has, per task, MaxVio and LIS as means over the layers, what a fair random router would show, and dead experts. It is
kept in RUN/eval/step-<number>.json; the tasks are in RUN/eval/tasks, for lm-eval's --include_path.

examples:
  evenload eval runs/tiny
  evenload eval runs/tiny 'tasks=[continuation_code, hellaswag]' limit=200 device=cuda batch=32
  evenload eval runs/tiny/checkpoints/step-00000160 against=hf

Exit code: 0, 1 when against=hf differs by more than 1e-4, 2 for what cannot be run.
"""
NUMBERS = ("batch", "limit")
WORDS = ("device", "precision", "against")


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="options, see below")


def evaluate(arguments: argparse.Namespace) -> int:
    from .checkpoint import CheckpointError
    from .errors import ConfigError, first_line
    from .eval_tasks import AGREE, FOLDER, evaluate_tasks
    from .files import write_atomic

    try:
        evaluation = evaluate_tasks(
            Path(arguments.source), **_options(arguments.overrides), say=lambda line: print(line, file=sys.stderr, flush=True)
        )
        path = evaluation.folder / FOLDER / f"step-{evaluation.step:08d}.json"
        write_atomic(path, json.dumps(as_json(evaluation, _read(path)), indent=1) + "\n")
    except (ConfigError, CheckpointError) as error:
        print(f"evenload: error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:  # a folder that cannot be written; logits that are NaN; a task that lm-eval refuses
        print(f"evenload: error: eval: {first_line(error)}", file=sys.stderr)
        return 2
    print(f"{table(evaluation)}\n")
    if evaluation.options["against"]:
        differ = sum(score.requests_that_differ for score in evaluation.scores)
        requests = sum(score.requests for score in evaluation.scores)
        print(f"log-likelihoods that differ by more than {AGREE:g} of their size: {differ:,} of {requests:,}")
    print(f"scores   {path}")
    if evaluation.differ > AGREE:
        print(f"evenload: error: eval: the export differs by {evaluation.differ:.2g}, more than {AGREE:g}", file=sys.stderr)
        return 1
    return 0


def table(evaluation: Evaluation) -> str:
    """One line per metric, with columns that are empty everywhere left out."""
    header = ["task", "n", "metric", "value", "± stderr", "chance", "hf", "difference"]
    header += ["MaxVio", "floor", "LIS", "dead experts"]
    lines = [_line(score, metric, number == 0) for score in evaluation.scores for number, metric in enumerate(score.metrics)]
    kept = [column for column in range(len(header)) if any(line[column] for line in lines)]
    cells = [[line[column] for column in kept] for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [header[column] in ("task", "metric") for column in kept]
    rule = ["-" * width if is_left else "-" * (width - 1) + ":" for width, is_left in zip(widths, left, strict=True)]
    rows = [
        [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in zip(row, widths, left, strict=True)]
        for row in (cells[0], rule, *cells[1:])
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def as_json(evaluation: Evaluation, before: dict[str, Any]) -> dict[str, Any]:
    """What is kept: the tasks of this evaluation, and of earlier ones of the same checkpoint those that it did not repeat.

    A trial on part of a task stands beside the whole task.
    """
    tasks = dict(before.get("tasks", {}))
    limit = evaluation.options["limit"]
    for score in evaluation.scores:
        tasks[score.task if limit is None else f"{score.task}, limit={limit}"] = {
            "n": score.n,
            "metrics": {
                metric.name: {"value": metric.value, "stderr": metric.stderr, "chance": metric.chance, "hf": metric.other}
                for metric in score.metrics
            },
            "load": score.load,
            "log_likelihoods": score.requests,
            "log_likelihoods_that_differ": score.requests_that_differ,
            "options": evaluation.options,
        }
    return {"checkpoint": str(evaluation.checkpoint), "step": evaluation.step, "tasks": tasks}


def _line(score: TaskScore, metric: Metric, first: bool) -> list[str]:
    load = score.load if first and score.load else None
    return [
        score.task if first else "",
        f"{score.n:,}" if first else "",
        metric.name,
        f"{metric.value:.4f}",
        "" if metric.stderr is None else f"± {metric.stderr:.4f}",
        "" if metric.chance is None else f"{metric.chance:.2f}",
        "" if metric.other is None else f"{metric.other:.4f}",
        "" if metric.other is None else f"{metric.value - metric.other:+.1e}",
        f"{load['maxvio']:.3f}" if load else "",
        f"{load['maxvio_floor']:.3f}" if load else "",
        f"{load['lis']:.3f}" if load else "",
        f"{load['dead']} of {load['experts']}" if load else "",
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _options(words: list[str]) -> dict[str, Any]:
    from .errors import ConfigError, close_to

    options: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in (known := ("tasks", *NUMBERS, *WORDS)):
            raise ConfigError(f"eval: {word!r}: options are {', '.join(f'{name}=' for name in known)}{close_to(key, known)}")
        if key == "tasks":
            options[key] = [name for part in value.strip("[]").split(",") if (name := part.strip().strip("'\""))]
        elif key in NUMBERS:
            if not value.isdigit() or int(value) < 1:
                raise ConfigError(f"eval: {word}: give a number, at least 1")
            options[key] = int(value)
        else:
            options[key] = value
    if options.get("against", "hf") != "hf":
        raise ConfigError(f"eval: against={options['against']}: it can be compared with hf, its Hugging Face export")
    return options
