"""The training run: data, model, optimizer, and the steps between a beginning or a checkpoint and the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..models import GPT
from .checkpoint import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    restore_rng,
    rng_state,
    save_checkpoint,
    step_of,
)
from .config import Config
from .data import load_data
from .errors import ConfigError
from .evaluation import Score, evaluate
from .files import write_atomic
from .interrupt import Interrupt, exit_on_sigterm
from .lock import only_run
from .monitor import Monitor, balance_scalars
from .optim import learning_rate, load_optimizer, make_optimizer, set_learning_rate
from .progress import Progress
from .runtime import check_expert_compute, choose_autocast, choose_device, seed_everything, tune_allocator
from .step import StepResult, tolerate_nan, train_step
from .summary import Summary, write_summary

CHECKPOINTS = "checkpoints"
MUST_MATCH = ("model", "data")  # sections that a checkpoint and the configuration must agree on
MUST_MATCH_KEYS = ("run.seed", "run.seq_len", "optim.decay_embeddings")
MAY_DIFFER = ("data.cache", "model.expert_compute", "model.loss_chunk", "model.measure_residual")
# Changed without a word on resuming: paths and intervals.
QUIET = ("data.cache", "run.out", "run.resume", "run.log_every", "run.eval_every", "run.save_every", "run.image_every")


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message is one line that says what happened and what to do."""


@dataclass
class Counters:
    """Where a run stands."""

    step: int = 0  # optimizer steps taken, bad ones included
    position: int = 0  # training sequences consumed
    tokens: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0


@dataclass
class Outcome:
    """How `Trainer.run` ended."""

    folder: Path
    summary: Summary | None  # None when interrupted
    interrupted: signal.Signals | None = None


class Trainer:
    """One pretraining run, described by a Config.

    Everything that decides the numbers is in the checkpoint: parameters, optimizer, balancers (part of the model's
    state), the data position, the counters and the random generators. On a CPU a run that was killed and continued
    equals, to the bit, one that was not.

    Args:
        command: what the user typed to start the run, shown when it is interrupted.
    """

    def __init__(self, config: Config, command: str = "", say: Callable[[str], None] = print) -> None:
        self.config, self.command, self.say = config, command, say
        run = config.run
        self.folder = Path(run.out or "runs/run").expanduser()
        if run.threads:
            torch.set_num_threads(run.threads)
        self.device = choose_device(run.device)
        self.autocast = choose_autocast(run.precision, self.device)
        if self.device.type == "cpu":
            tune_allocator()
        check_expert_compute(config.model, self.device, self.autocast)
        saved = self._find_checkpoint()
        with exit_on_sigterm():
            self.data = load_data(config, say)
        seed_everything(run.seed)
        self.model = GPT(config.model).to(self.device)
        tolerate_nan(self.model)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.counters = Counters()
        self.saved_step = 0  # the newest that this run's own folder holds
        if saved is not None:
            self._restore(*saved)
            if saved[1].resolve().parent == (self.folder / CHECKPOINTS).resolve():
                self.saved_step = self.counters.step
        size = config.model.num_parameters()
        say(f"{size.total / 1e6:.1f}M parameters, {size.active / 1e6:.1f}M active per token, on {self.device}")

    def run(self) -> Outcome:
        """Train to the last step, evaluate, write the summary.

        Raises TrainingStopped when steps keep being bad or cannot be saved, ConfigError when another process has the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with only_run(self.folder):
            return self._run()

    def _run(self) -> Outcome:
        run, now = self.config.run, self.counters
        write_atomic(self.folder / "config.yaml", self.config.to_yaml())
        write_atomic(self.folder / "tokenizer.json", self.data.tokenizer.to_json())
        monitor = Monitor(self.folder, now.step)
        progress = Progress(run.steps, now.step)
        try:
            with Interrupt() as interrupt:
                while now.step < run.steps and not interrupt.caught:
                    # Also where the run goes on from a checkpoint whose evaluation was interrupted.
                    if now.step and _due(now.step, run.eval_every) and now.step not in monitor.validated:
                        self._evaluate(monitor, progress, interrupt)
                        if interrupt.caught:
                            break
                    self._step(monitor, progress)
                    if _due(now.step, run.save_every):
                        self._save()
                self._save()
                scores = None if interrupt.caught else self._evaluate(monitor, progress, interrupt)
                if scores is None:
                    progress.close()
                    self._say_how_to_resume()
                    return Outcome(self.folder, None, interrupt.caught)
        finally:
            progress.close()
            monitor.close()
        return Outcome(self.folder, write_summary(self.config, scores, self.folder))

    def _step(self, monitor: Monitor, progress: Progress) -> None:
        run, now = self.config.run, self.counters
        lr = learning_rate(now.step, run.steps, self.config.optim.lr, self.config.schedule)
        set_learning_rate(self.optimizer, lr)
        began = time.perf_counter()
        batches = []
        for _ in range(run.batch // run.microbatch):
            batches.append(self.data.mixture.batch(now.position, run.microbatch))
            now.position += run.microbatch
        result = train_step(self.model, self.optimizer, batches, clip=self.config.optim.clip, autocast=self.autocast)
        dropped = self.model.pop_dropped().sum()  # every step, so that each counts its own
        tokens = run.batch * run.seq_len
        speed = tokens / (time.perf_counter() - began)  # reading the loss has waited for the device
        now.step += 1
        now.tokens += tokens
        now.bad_in_a_row = 0 if result.good else now.bad_in_a_row + 1
        now.bad_steps += not result.good
        self._record(monitor, progress, result, lr, speed, dropped)
        if now.bad_in_a_row >= run.max_bad_steps:
            self._save()
            raise TrainingStopped(
                f"stopped at step {now.step}: {now.bad_in_a_row} steps in a row had a non-finite loss or gradient (last loss "
                f"{result.loss:.4g}, gradient norm {result.grad_norm:.4g}). None of them changed the model. Go on with a "
                f"lower optim.lr or a longer schedule.warmup, from here or, with run.resume=CHECKPOINT and another run.out, "
                f"from an older one of {self.folder / CHECKPOINTS}"
            )

    def _record(
        self, monitor: Monitor, progress: Progress, result: StepResult, lr: float, speed: float, dropped: torch.Tensor
    ) -> None:
        run, now = self.config.run, self.counters
        last = now.step == run.steps
        maxvio = float("nan")
        if result.report is not None:
            monitor.add_load(result.report.counts)
        if not result.good:
            progress.say(
                f"step {now.step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}: skipped "
                f"({now.bad_in_a_row} in a row, {now.bad_steps} in all)"
            )
        if _due(now.step, run.log_every) or last or not result.good:
            scalars = {
                "train/loss": result.nll,
                "train/lr": lr,
                "train/grad_norm": result.grad_norm,
                "train/router_grad_norm": result.router_grad_norm,
                "train/tokens": now.tokens,
                "train/tokens_per_second": speed,
                "train/bad_steps": now.bad_steps,
            }
            if self.config.model.z_loss > 0:
                scalars["train/objective"] = result.loss
            if result.report is not None:
                scalars["train/dropped"] = float(dropped)
                scalars |= balance_scalars(result.report)
                maxvio = scalars.get("balance/maxvio/mean", maxvio)
            monitor.record(now.step, scalars)
        if _due(now.step, run.image_every) or last:
            monitor.draw_load(now.step)
        progress.update(now.step, result.nll, maxvio, speed)

    def _evaluate(self, monitor: Monitor, progress: Progress, interrupt: Interrupt) -> dict[str, Score] | None:
        """Scores of the model as it is, recorded once per step; None when interrupted."""
        run, step = self.config.run, self.counters.step
        scores = evaluate(
            self.model,
            self.data.validation,
            self.data.tokenizer,
            seq_len=run.seq_len,
            max_tokens=run.eval_tokens,
            batch_size=run.microbatch,
            autocast=self.autocast,
            stop=lambda: interrupt.caught is not None,
        )
        if interrupt.caught:
            return None
        bits = {f"validation/bits_per_byte/{name}": score.bits_per_byte for name, score in scores.items()}
        if step not in monitor.validated:
            monitor.record(step, bits | {f"validation/loss/{name}": score.loss for name, score in scores.items()})
        shown = ", ".join(f"{name} {score.bits_per_byte:.3f}" for name, score in scores.items())
        progress.say(f"step {step}: validation bits per byte: {shown}")
        return scores

    def _save(self) -> None:
        if self.counters.step == self.saved_step:
            return
        state = {
            "counters": asdict(self.counters),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": rng_state(),
            "config": self.config.to_dict(),
            "data": self.data.fingerprint,
        }
        folder = self.folder / CHECKPOINTS
        try:
            save_checkpoint(folder, self.counters.step, state, self.config.run.keep_last)
        except CheckpointError as error:
            whole = list_checkpoints(folder)
            newest = f"the newest checkpoint is {whole[-1]}" if whole else "there is no older checkpoint"
            raise TrainingStopped(f"{error}; {newest}. Make room, then give the same command again") from error
        self.saved_step = self.counters.step

    def _find_checkpoint(self) -> tuple[dict[str, Any], Path] | None:
        """The checkpoint to continue from, as run.resume says. Raises ConfigError or CheckpointError."""
        resume, own = self.config.run.resume, self.folder / CHECKPOINTS
        if resume not in ("auto", "never"):
            path = Path(resume).expanduser()
            found = load_newest(path) or (load_checkpoint(path), path, [])
            newer = [other.name for other in list_checkpoints(own) if step_of(other) > found[0]["counters"]["step"]]
            if newer:
                raise ConfigError(f"run.resume = {resume}: {own} holds newer checkpoints ({newer[-1]}); choose another run.out")
        else:
            newest = load_newest(own)
            if newest is None:
                return None
            found = newest
        state, path, refused = found
        if resume == "never":
            raise ConfigError(f"run.resume = never, but {path} exists: continue it (run.resume=auto) or choose another run.out")
        for error in refused:
            self.say(f"refused {error}")
        return state, path

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        changed = _differences(state["config"], self.config.to_dict())
        for key, before, after in changed:
            matters = key.split(".")[0] in MUST_MATCH or key in MUST_MATCH_KEYS
            # In domain mode a position counts whole microbatches.
            matters |= key == "run.microbatch" and self.config.data.mode == "domain"
            if matters and key not in MAY_DIFFER:
                raise ConfigError(f"{path}: {key} was {before!r} and is now {after!r}; put it back or choose another run.out")
        if state["data"] != self.data.fingerprint:
            raise ConfigError(f"{path}: the corpus has changed since; put it back or choose another run.out")
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        restore_rng(state["rng"])
        self.counters = Counters(**state["counters"] | {"bad_in_a_row": 0})  # who continues a stopped run has changed something
        self.say(f"continuing after step {self.counters.step} from {path}")
        noted = [f"{key} {before!r} -> {after!r}" for key, before, after in changed if key not in QUIET]
        if noted:
            self.say(f"changed since the checkpoint: {', '.join(noted)}")

    def _say_how_to_resume(self) -> None:
        now, run = self.counters, self.config.run
        self.say(f"stopped after step {now.step} of {run.steps}; everything is saved in {self.folder / CHECKPOINTS}")
        if self.command:
            self.say(f"continue with:\n  {self.command}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, after) of every two-level key whose value differs."""
    return [
        (f"{section}.{key}", before.get(section, {}).get(key), value)
        for section, body in after.items()
        for key, value in body.items()
        if before.get(section, {}).get(key) != value
    ]
