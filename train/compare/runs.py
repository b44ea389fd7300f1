"""Trains the runs of a plan, several at a time, each in a process of its own; what is finished stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..config import differences
from ..errors import ConfigError
from ..files import write_atomic
from ..interrupt import Interrupt
from ..monitor import METRICS
from ..progress import Progress
from ..summary import FACTS
from .plan import PlannedRun

CONFIG, LOG = "config.yaml", "log.txt"
POLL = 0.5  # seconds
LAST_LINE = 65_536  # bytes at the end of metrics.jsonl that hold its last whole line
MAY_DIFFER = ("run.out", "run.threads", "run.resume", "data.cache")  # between a run that is there and the one planned


@dataclass
class Process:
    """A run that is being trained."""

    run: PlannedRun
    slot: int  # which of the places that run at a time
    handle: subprocess.Popen[bytes]


@dataclass
class Trained:
    """How the training of a plan ended."""

    failed: dict[PlannedRun, str]  # and why
    interrupted: signal.Signals | None


def is_finished(run: PlannedRun) -> bool:
    return (run.folder / FACTS).exists()


def refuse_other_runs(runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError where a run's folder holds a run with another configuration."""
    for run in runs:
        path = run.folder / CONFIG
        if path.exists():
            there = yaml.safe_load(path.read_text(encoding="utf-8"))
            changed = [item for item in differences(there, run.config.to_dict()) if item[0] not in MAY_DIFFER]
            if changed:
                key, before, after = changed[0]
                raise ConfigError(
                    f"{run.folder} was made with {key} = {before!r}, now it is {after!r}; choose another out=PATH, or delete it"
                )


def train_all(runs: Sequence[PlannedRun], jobs: int, *, quiet: bool) -> Trained:
    """Train what is not finished. A run that was stopped continues; one that fails is reported, and the others go on.

    At the first SIGINT or SIGTERM the runs save and stop.
    """
    waiting = [run for run in runs if not is_finished(run)]
    outcome = Trained({}, None)
    steps = {run: run.config.run.steps if is_finished(run) else _last_step(run.folder) for run in runs}
    progress = Progress(sum(run.config.run.steps for run in runs), sum(steps.values()), quiet=quiet)
    running: list[Process] = []
    try:
        with Interrupt(quiet=quiet) as interrupt:
            while waiting or running:
                if interrupt.caught and outcome.interrupted is None:
                    outcome.interrupted = interrupt.caught
                    waiting = []
                    for process in running:
                        process.handle.terminate()
                while waiting and len(running) < jobs:
                    slot = min(set(range(jobs)) - {process.slot for process in running})
                    running.append(_start(waiting.pop(0), slot))
                time.sleep(POLL)
                for process in [process for process in running if process.handle.poll() is not None]:
                    running.remove(process)
                    _close(process, outcome, progress)
                for run in [process.run for process in running]:
                    steps[run] = _last_step(run.folder)
                done = [run for run in runs if is_finished(run)]
                steps |= {run: run.config.run.steps for run in done}
                now = ", ".join(f"{process.run.name} at {steps[process.run]:,}" for process in running)
                progress.update(sum(steps.values()), [f"{len(done)} of {len(runs)} runs done", *([now] if now else [])])
    finally:
        for process in running:  # an error of ours, or a second interrupt
            process.handle.kill()
        progress.close()
    return outcome


def _start(run: PlannedRun, slot: int) -> Process:
    write_atomic(run.folder / CONFIG, run.config.to_yaml())
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    if run.config.run.threads:
        environment["OMP_NUM_THREADS"] = str(run.config.run.threads)
    if (gpus := _visible_gpus()) and run.config.run.device in ("auto", "cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    with (run.folder / LOG).open("ab") as log:
        handle = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", str(run.folder / CONFIG)],
            stdin=subprocess.PIPE,  # tells the run when we are gone
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches us, and we tell the runs
        )
    return Process(run, slot, handle)


def _visible_gpus() -> list[str]:
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(gpu) for gpu in range(torch.cuda.device_count())]


def _close(process: Process, outcome: Trained, progress: Progress) -> None:
    run, code = process.run, process.handle.returncode
    if process.handle.stdin:
        process.handle.stdin.close()
    if code == 0 and is_finished(run):
        progress.say(f"finished {run.name}")
    elif outcome.interrupted is None:
        outcome.failed[run] = f"{_last_words(run.folder / LOG, code)} ({run.folder / LOG})"
        progress.say(f"failed   {run.name}: {outcome.failed[run]}")


def _last_words(log: Path, code: int) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("evenload: error: ")]
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return errors[-1].removeprefix("evenload: error: ") if errors else f"{how}: {lines[-1] if lines else 'it said nothing'}"


def _last_step(folder: Path) -> int:
    """The step of the last whole line of a run's metrics, 0 before there is one."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LAST_LINE))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        if line.endswith(b"\n"):
            try:
                return int(json.loads(line)["step"])
            except json.JSONDecodeError:
                return 0
    return 0
