"""The training run: data, model, optimizer, and the steps between a beginning or a checkpoint and the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..models import GPT
from .checkpoint import CHECKPOINTS, Checkpoint, Checkpointer, CheckpointError, list_checkpoints, step_of
from .config import Config, differences
from .data import load_data
from .errors import ConfigError, TrainingStopped
from .evaluation import Score, evaluate
from .files import write_atomic
from .interrupt import Interrupt, exit_on_sigterm
from .layout import choose_layout, microbatches
from .lock import only_run
from .monitor import Monitor, balance_scalars
from .optim import learning_rate, make_optimizer, set_learning_rate
from .parallel import build_sharded, make_meshes
from .progress import Progress
from .runtime import check_expert_compute, choose_autocast, choose_device, seed_everything, tune_allocator
from .step import StepResult, tolerate_nan, train_step
from .summary import Summary, write_summary
from .world import World, from_environment, joined

MUST_MATCH = ("model", "data")  # sections that a checkpoint and the configuration must agree on
MUST_MATCH_KEYS = ("run.seed", "run.seq_len", "optim.decay_embeddings")
MAY_DIFFER = ("data.cache", "model.expert_compute", "model.loss_chunk", "model.measure_residual")
# Changed without a word on resuming: paths and intervals.
QUIET = ("data.cache", "run.out", "run.resume", "run.log_every", "run.eval_every", "run.save_every", "run.image_every")


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
    summary: Summary | None  # None when interrupted, and on other ranks than the first
    interrupted: signal.Signals | None = None


class Trainer:
    """One pretraining run, described by a Config.

    Everything that decides the numbers is in the checkpoint: parameters, optimizer, balancers (part of the model's
    state), the data position, the counters and the random generators. On a CPU a run that was killed and continued
    equals, to the bit, one that was not.

    Args:
        command: what the user typed to start the run, shown when it is interrupted.
        say: prints a line.
        world: this process's place among the ranks, inside of `joined(world)`. The first rank speaks and writes for all.
    """

    def __init__(
        self,
        config: Config,
        command: str = "",
        say: Callable[[str], None] = print,
        world: World = World(),  # noqa: B008  (frozen)
    ) -> None:
        self.config, self.command, self.world = config, command, world
        self.say = say if world.is_main else _silent
        run = config.run
        self.layout = choose_layout(config.parallel, world.size, config.model.num_experts)
        microbatches(run.batch, run.microbatch, world.size)  # refuses what does not divide, before any data is prepared
        self.folder = Path(run.out or "runs/run").expanduser()
        if run.threads:
            torch.set_num_threads(run.threads)
        self.device = choose_device(run.device, world.local_rank if world.size > 1 else None)
        self.autocast = choose_autocast(run.precision, self.device)
        if self.device.type == "cpu":
            tune_allocator()
        check_expert_compute(config.model, self.device, self.autocast)
        self.checkpoints = Checkpointer(self.folder / CHECKPOINTS, run.keep_last)
        saved = self._find_checkpoint()
        with exit_on_sigterm():
            self.data = world.main_first("data", lambda: load_data(config, self.say))
        seed_everything(run.seed)
        self.model = self._build()
        tolerate_nan(self.model)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.counters = Counters()
        self.saved_step = 0  # the newest that this run's own folder holds
        self.maxvio = float("nan")  # mean over the layers, of the last step that was logged
        self.stop: signal.Signals | None = None  # what the ranks have agreed to stop at
        if saved is not None:
            self._restore(saved)
            if saved.path.resolve().parent == (self.folder / CHECKPOINTS).resolve():
                self.saved_step = self.counters.step
        size = config.model.num_parameters()
        where = f"{self.device}" if world.size == 1 else f"{world.size} ranks of {self.device.type}: {self.layout}"
        self.say(f"{size.total / 1e6:.1f}M parameters, {size.active / 1e6:.1f}M active per token, on {where}")

    def _build(self) -> GPT:
        """The model, with the same weights on any number of ranks."""
        run = self.config.run
        if self.world.size == 1:
            model = GPT(self.config.model).to(self.device)
        else:
            meshes = make_meshes(self.layout, self.device.type, self.world.timeout)
            model = build_sharded(self.config.model, meshes, self.device, self.autocast)
        model.set_activation_checkpointing(run.activation_checkpointing)
        if run.compile:
            model.compile_blocks()
        return model

    def run(self) -> Outcome:
        """Train to the last step, evaluate, write the summary.

        Raises TrainingStopped when steps keep being bad or cannot be saved, ConfigError when another process has the folder.
        """
        if not self.world.is_main:
            return self._run()
        self.folder.mkdir(parents=True, exist_ok=True)
        with only_run(self.folder):
            return self._run()

    def _run(self) -> Outcome:
        run, now = self.config.run, self.counters
        monitor = None
        if self.world.is_main:
            write_atomic(self.folder / "config.yaml", self.config.to_yaml())
            write_atomic(self.folder / "tokenizer.json", self.data.tokenizer.to_json())
            monitor = Monitor(self.folder, now.step)
        validated = self.world.from_main(monitor.validated if monitor else set())
        progress = Progress(run.steps, now.step, quiet=not self.world.is_main)
        try:
            with Interrupt(quiet=not self.world.is_main) as interrupt, self.checkpoints:
                while now.step < run.steps and not self._agree_to_stop(interrupt):
                    # Also where the run goes on from a checkpoint whose evaluation was interrupted.
                    if now.step and _due(now.step, run.eval_every) and now.step not in validated:
                        self._evaluate(monitor, progress, interrupt)
                        if self.stop:
                            break
                    self._step(monitor, progress)
                    if _due(now.step, run.save_every):
                        self._save()
                self._save(wait=True)
                scores = None if self.stop else self._evaluate(monitor, progress, interrupt)
                if scores is None:
                    progress.close()
                    self._say_how_to_resume()
                    return Outcome(self.folder, None, self.stop)
        finally:
            progress.close()
            if monitor is not None:
                monitor.close()
        return Outcome(self.folder, write_summary(self.config, scores, self.folder) if self.world.is_main else None)

    def _agree_to_stop(self, interrupt: Interrupt) -> bool:
        """Whether any rank has been told to stop; all of them then do, at the same place."""
        caught = self.world.largest(int(interrupt.caught or 0))
        self.stop = signal.Signals(caught) if caught else None
        return self.stop is not None

    def _step(self, monitor: Monitor | None, progress: Progress) -> None:
        run, now, world = self.config.run, self.counters, self.world
        lr = learning_rate(now.step, run.steps, self.config.optim.lr, self.config.schedule)
        set_learning_rate(self.optimizer, lr)
        began = time.perf_counter()
        batches = []
        # The microbatches of a step are dealt out to the ranks in turn.
        for first in range(world.rank * run.microbatch, run.batch, world.size * run.microbatch):
            batches.append(self.data.mixture.batch(now.position + first, run.microbatch))
        now.position += run.batch
        result = train_step(
            self.model,
            self.optimizer,
            batches,
            clip=self.config.optim.clip,
            autocast=self.autocast,
            world=world,
            replicas=self.layout.dp_replicate,
        )
        dropped = self.model.pop_dropped().sum()  # every step, so that each counts its own
        if self.config.model.capacity_factor is not None:
            world.sum(dropped)
        tokens = run.batch * run.seq_len
        speed = tokens / (time.perf_counter() - began)  # reading the loss has waited for the device
        now.step += 1
        now.tokens += tokens
        now.bad_in_a_row = 0 if result.good else now.bad_in_a_row + 1
        now.bad_steps += not result.good
        if monitor is not None:
            self._record(monitor, progress, result, lr, speed, dropped)
        if now.bad_in_a_row >= run.max_bad_steps:
            self._save(wait=True)
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
        if result.report is not None:
            monitor.add(result.report)
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
                self.maxvio = scalars.get("balance/maxvio/mean", self.maxvio)
            monitor.record(now.step, scalars)
        if _due(now.step, run.image_every) or last:
            monitor.end_window(now.step)
        progress.update(now.step, [f"loss {result.nll:.3f}", f"MaxVio {self.maxvio:.2f}", f"{speed:,.0f} tokens/s"])

    def _evaluate(self, monitor: Monitor | None, progress: Progress, interrupt: Interrupt) -> dict[str, Score] | None:
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
            stop=lambda: self._agree_to_stop(interrupt),
            world=self.world,
        )
        if self.stop:
            return None
        if monitor is None:
            return scores
        bits = {f"validation/bits_per_byte/{name}": score.bits_per_byte for name, score in scores.items()}
        if step not in monitor.validated:
            monitor.record(step, bits | {f"validation/loss/{name}": score.loss for name, score in scores.items()})
        shown = ", ".join(f"{name} {score.bits_per_byte:.3f}" for name, score in scores.items())
        progress.say(f"step {step}: validation bits per byte: {shown}")
        return scores

    def _save(self, *, wait: bool = False) -> None:
        """Begin to save this step, unless it is saved; the error that is raised is that of the save before.

        With `wait`, return when it is on the disk.
        """
        extra = {"counters": asdict(self.counters), "config": self.config.to_dict(), "data": self.data.fingerprint}
        try:
            if self.counters.step != self.saved_step:
                self.checkpoints.save(self.counters.step, self.model, self.optimizer, extra)
                self.saved_step = self.counters.step
            if wait:
                self.checkpoints.wait()
        except CheckpointError as error:
            raise TrainingStopped(f"{error}. Make room, then give the same command again") from error

    def _find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from, as run.resume says. Raises ConfigError or CheckpointError."""
        resume, own = self.config.run.resume, self.folder / CHECKPOINTS
        if resume not in ("auto", "never"):
            path = Path(resume).expanduser()
            found = self.checkpoints.newest(path) or (self.checkpoints.open(path), [])
            newer = [other.name for other in list_checkpoints(own) if step_of(other) > found[0].step]
            if newer:
                raise ConfigError(f"run.resume = {resume}: {own} holds newer checkpoints ({newer[-1]}); choose another run.out")
        else:
            newest = self.checkpoints.newest()
            if newest is None:
                return None
            found = newest
        checkpoint, refused = found
        if resume == "never":
            raise ConfigError(
                f"run.resume = never, but {checkpoint.path} exists: continue it (run.resume=auto) or choose another run.out"
            )
        for error in refused:
            self.say(f"refused {error}")
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> None:
        path, state = checkpoint.path, checkpoint.extra
        changed = differences(state["config"], self.config.to_dict())
        for key, before, after in changed:
            matters = key.split(".")[0] in MUST_MATCH or key in MUST_MATCH_KEYS
            # In domain mode a position counts whole microbatches.
            matters |= key == "run.microbatch" and self.config.data.mode == "domain"
            if matters and key not in MAY_DIFFER:
                raise ConfigError(f"{path}: {key} was {before!r} and is now {after!r}; put it back or choose another run.out")
        if state["data"] != self.data.fingerprint:
            raise ConfigError(f"{path}: the corpus has changed since; put it back or choose another run.out")
        self.checkpoints.load(checkpoint, self.model, self.optimizer)
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


def train(config: Config, command: str = "", say: Callable[[str], None] = print) -> Outcome:
    """Run `config` as the rank that this process is, alone or among others (torchrun, SLURM); see `Trainer`.

    Raises RankLost when another rank has gone or does not answer within parallel.timeout, and what `Trainer` raises.
    """
    world = from_environment(config.parallel.timeout)
    with joined(world, choose_device(config.run.device, world.local_rank if world.size > 1 else None)):
        return Trainer(config, command, say, world).run()


def _silent(line: str) -> None:
    """Says nothing: one of several ranks speaks for all."""


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
