"""Run lm-eval's tasks on a checkpoint, on it and its Hugging Face export if wanted, and put the scores beside the load."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import ConfigError, close_to, first_line
from .export import TOKENIZER
from .held_out import task_names, write_tasks
from .hugging_face import write_hf
from .runtime import choose_device
from .trained import load_trained

HUB = "https://huggingface.co"
PATIENCE = 3.0  # seconds that the hub has to answer
BOOTSTRAP = 1000  # draws, for metrics whose standard error has no formula
AGREE = 1e-4  # largest difference between a run and its export
ACCURACIES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")  # shares of right answers
FOLDER, TASKS = "eval", "tasks"  # in the run's folder


@dataclass
class Metric:
    """One number of a task. `other` is what the model that it is compared with got."""

    name: str
    value: float
    stderr: float | None
    chance: float | None
    other: float | None = None


@dataclass
class TaskScore:
    """The metrics of a task over `n` documents, and `TaskLoad.summary` of it; groups of tasks have no load of their own."""

    task: str
    n: int
    metrics: list[Metric]
    load: dict[str, Any] | None = None
    requests: int = 0  # log-likelihoods that were compared
    requests_that_differ: int = 0  # by more than AGREE of their size


@dataclass
class Evaluation:
    """What was run on what."""

    checkpoint: Path
    folder: Path  # of the run
    step: int
    options: dict[str, Any]
    scores: list[TaskScore] = field(default_factory=list)

    @property
    def differ(self) -> float:
        """Largest difference of a metric between the run and its export; 0 where they were not compared."""
        pairs = [(metric.value, metric.other) for score in self.scores for metric in score.metrics]
        return max((abs(one - other) for one, other in pairs if other is not None), default=0.0)


def evaluate_tasks(
    source: Path,
    tasks: Sequence[str] = (),
    *,
    batch: int = 8,
    limit: int | None = None,
    device: str = "auto",
    precision: str = "fp32",
    against: str | None = None,
    say: Callable[[str], None] = print,
) -> Evaluation:
    """Score a run's newest checkpoint, or one checkpoint, on tasks of lm-eval.

    Args:
        source: a run's folder or one of its checkpoints.
        tasks: names that lm-eval knows, or the run's own (`task_names`); nothing = all of the latter.
        limit: at most so many documents per task.
        against: "hf" = the same through the checkpoint's Hugging Face export and lm-eval's own `hf` model.

    Raises ConfigError and CheckpointError.
    """
    trained = load_trained(source, choose_device(device), say)
    known = task_names(trained.config)
    own = [name for name in known if not tasks or name in tasks]
    others = [name for name in tasks if name not in known]
    reachable = _prepare(bool(others) or any(each.kind == "hub" for each in trained.config.data.sources))
    EvenloadLM, TaskManager, simple_evaluate = _lm_eval()
    lm = EvenloadLM(trained, batch_size=batch, precision=precision)
    folder = trained.folder / FOLDER / TASKS
    names = [*write_tasks(trained.config, own, folder, say), *others]
    if not names:
        raise ConfigError(f"eval: {trained.folder} has held out too little text for {', '.join(own)}")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    if not set(others) <= set(manager.all_tasks):
        say("reading lm-eval's index of tasks")
        manager = TaskManager(include_path=str(folder))
    loaded = [part for name in names for part in _load(manager, name, known, reachable)]

    def run(model: Any) -> dict[str, Any]:
        return simple_evaluate(
            model=model, tasks=loaded, task_manager=manager, limit=limit, log_samples=True, bootstrap_iters=BOOTSTRAP
        )

    results = run(lm)
    options = {"batch": batch, "limit": limit, "device": str(lm.device), "precision": precision, "against": against}
    evaluation = Evaluation(trained.checkpoint, trained.folder, trained.step, options, _scores(results))
    for score in evaluation.scores:
        if score.task in lm.load:
            score.load = lm.load[score.task].summary()
    if against is not None:
        say("the same through its Hugging Face export and lm-eval's hf model")
        with tempfile.TemporaryDirectory() as export:
            model = dataclasses.asdict(trained.config.model)
            write_hf(Path(export), model, trained.model.state_dict(), trained.folder / TOKENIZER)
            _compare(evaluation, results, run(_hf_model(export, batch, lm.device)))
    return evaluation


def _prepare(hub: bool) -> bool:
    """Settle what lm-eval's libraries read when they are imported. Without a hub in reach they are told so, or each data set
    would be asked for again and again; those that were loaded before still work. Returns whether the hub is in reach."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads that a fork would warn about
    reachable = hub and not os.environ.get("HF_HUB_OFFLINE") and _answers(os.environ.get("HF_ENDPOINT", HUB))
    if not reachable:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return reachable


def _answers(address: str) -> bool:
    parts = urlsplit(address)
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        with socket.create_connection((parts.hostname or "", port), timeout=PATIENCE):
            return True
    except OSError:
        return False


def _lm_eval() -> tuple[Any, Any, Any]:
    try:
        import datasets
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from .lm_eval_model import EvenloadLM
    except ImportError as error:
        raise ConfigError(f"eval: {first_line(error)}; pip install 'evenload[train,eval]'") from error
    datasets.disable_progress_bars()
    return EvenloadLM, TaskManager, simple_evaluate


def _load(manager: Any, name: str, known: Sequence[str], reachable: bool) -> list[Any]:
    """The task, or the group of tasks, of a name."""
    if name not in manager.all_tasks:
        raise ConfigError(
            f"eval: unknown task {name!r}{close_to(name, known)}; made of this run's held-out text: {', '.join(known)}; "
            "others are lm-eval's own (lm-eval ls tasks), whose data comes from the hub"
        )
    try:
        loaded = manager.load([name])
    except Exception as error:  # the readers of data sets raise almost anything
        hub = "" if reachable or name in known else f"; the hub is out of reach, without it there are {', '.join(known)}"
        raise ConfigError(f"eval: {name}: {first_line(error)}{hub}") from error
    groups = loaded.get("groups", {})
    return [groups[name]] if name in groups else list(loaded["tasks"].values())


def _hf_model(folder: str, batch: int, device: Any) -> Any:
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ConfigError(f"eval: against=hf: {first_line(error)}; pip install 'evenload[train,eval,hf]'") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # a model without shared experts
        return HFLM(pretrained=folder, batch_size=batch, device=str(device), dtype="float32")


def _scores(results: dict[str, Any]) -> list[TaskScore]:
    scores = []
    for task, found in results["results"].items():
        samples = results["samples"].get(task, [])
        metrics = []
        for key, value in found.items():
            name, _, which = key.partition(",")
            if not which or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = found.get(f"{name}_stderr,{which}")
            if name == "bits_per_byte":
                stderr = ratio_stderr([sample[name] for sample in samples])
            shown = name if which == "none" else f"{name} ({which})"
            metrics.append(Metric(shown, float(value), stderr if isinstance(stderr, int | float) else None, None))
        if results["configs"].get(task, {}).get("output_type") == "multiple_choice":
            for metric in metrics:
                metric.chance = _chance(samples) if metric.name in ACCURACIES else None
        scores.append(TaskScore(task, int(found.get("sample_len", 0)), metrics))
    return scores


def _chance(samples: Sequence[dict[str, Any]]) -> float:
    """What guessing gets: a question with n choices is n requests, and n more without the context for acc_mutual_info."""
    times = 2 if "acc_mutual_info" in samples[0]["metrics"] else 1
    return sum(times / len(sample["arguments"]) for sample in samples) / len(samples)


def ratio_stderr(pairs: Sequence[tuple[float, int]]) -> float | None:
    """Standard error of the bits per byte of documents, each (nats of log-likelihood, bytes): that of a ratio of sums over a
    sample of documents, linearised (Cochran, Sampling Techniques, 6.4). None for fewer than two documents."""
    n = len(pairs)
    if n < 2:
        return None
    total = sum(size for _, size in pairs)
    ratio = sum(nats for nats, _ in pairs) / total
    squares = sum((nats - ratio * size) ** 2 for nats, size in pairs)
    return math.sqrt(n / (n - 1) * squares) / total / math.log(2)


def _compare(evaluation: Evaluation, results: dict[str, Any], others: dict[str, Any]) -> None:
    for score, other in zip(evaluation.scores, _scores(others), strict=True):
        for metric, same in zip(score.metrics, other.metrics, strict=True):
            metric.other = same.value
        ours, theirs = (_log_likelihoods(each["samples"].get(score.task, [])) for each in (results, others))
        score.requests = len(ours)
        score.requests_that_differ = sum(abs(a - b) > AGREE * max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))


def _log_likelihoods(samples: Sequence[dict[str, Any]]) -> list[float]:
    found = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        for answers in sample["resps"]:
            for answer in answers:
                value = answer[0] if isinstance(answer, tuple | list) else answer
                if isinstance(value, float):
                    found.append(value)
    return found
