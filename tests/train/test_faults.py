"""What happens to a run of several processes when some of them die or fall silent, as a user starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evenload.train.checkpoint import list_checkpoints
from evenload.train.monitor import read_metrics

SETTINGS = ["run.steps=30", "run.save_every=3", "run.eval_every=0", "run.image_every=0", "run.batch=8"]


class Run:
    """`evenload train --nproc 2` in a process group of its own."""

    def __init__(self, config: str, out: Path, *more: str) -> None:
        self.out = out
        words = [config, f"run.out={out}", *SETTINGS, "parallel.ep=2", *more, "--nproc", "2"]
        command = [sys.executable, "-m", "evenload.train.cli", "train", *words]
        self.log = out.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=self.environment())

    @staticmethod
    def environment() -> dict[str, str]:
        return os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def wait_until(self, seen: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.002)

    def saved(self) -> bool:
        return bool(list_checkpoints(self.out / "checkpoints"))

    def newest(self) -> str:
        return list_checkpoints(self.out / "checkpoints")[-1].name

    def saving(self) -> bool:
        """In the middle of a save that is not the first."""
        return self.saved() and any((self.out / "checkpoints").glob(".step-*.part/*"))

    def ranks(self) -> dict[int, int]:
        """{rank: process id}"""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "environ").read_bytes().decode().split("\0")
                command = (path / "cmdline").read_bytes().decode().split("\0")
            except (OSError, UnicodeDecodeError):  # it has ended, or is somebody else's
                continue
            rank = [word.removeprefix("RANK=") for word in words if word.startswith("RANK=")]
            if rank and f"run.out={self.out}" in command:
                found[int(rank[0])] = int(path.name)
        return found

    def send(self, number: signal.Signals, *ranks: int) -> None:
        processes = self.ranks()
        for rank in ranks:
            os.kill(processes[rank], number)

    def end(self, seconds: float = 180) -> int:
        return self.process.wait(seconds)

    def said(self) -> str:
        return self.log.read_text()

    def lines(self) -> list[dict[str, object]]:
        return [{k: v for k, v in line.items() if k != "train/tokens_per_second"} for line in read_metrics(self.out)]


@pytest.fixture(scope="module")
def whole(mini: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The metrics of a run that nothing happened to."""
    run = Run(mini, tmp_path_factory.mktemp("faults") / "whole")
    assert run.end() == 0, run.said()
    return run.lines()


@pytest.fixture
def start(mini: str, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def started(*more: str) -> Run:
        runs.append(Run(mini, tmp_path / "run", *more))
        return runs[-1]

    yield started
    for run in runs:
        for process in [*run.ranks().values(), run.process.pid]:
            if run.process.poll() is None or process != run.process.pid:
                os.kill(process, signal.SIGKILL)


def test_killed_ranks_are_started_again_and_nothing_changes(start: Callable[..., Run], whole: list[dict[str, object]]) -> None:
    """A rank in a step, the first rank, and all of them in the middle of a save."""
    run = start("--max-restarts=3")
    for times, victims in enumerate([(1,), (0,), (0, 1)], start=1):
        run.wait_until(run.saving if times == 3 else run.saved)
        run.send(signal.SIGKILL, *victims)
        if times < 3:
            reached = run.newest()
            run.wait_until(lambda times=times: run.said().count("continuing after step") == times)
            run.wait_until(lambda reached=reached: run.newest() > reached)
    assert run.end() == 0, run.said()
    assert run.said().count("continuing after step") == 3
    assert "refused" not in run.said()
    assert run.lines() == whole


def test_a_silent_rank_ends_the_job_with_a_message(start: Callable[..., Run]) -> None:
    run = start("parallel.timeout=20", "run.steps=10000", "run.save_every=0")
    run.wait_until(lambda: (run.out / "metrics.jsonl").exists() and len(read_metrics(run.out)) > 2)
    run.send(signal.SIGSTOP, 1)
    assert run.end() == 1, run.said()
    assert "another rank did not answer within parallel.timeout = 20 s" in run.said()
    assert run.ranks() == {}


def test_an_interrupt_saves_and_the_same_command_continues(start: Callable[..., Run], whole: list[dict[str, object]]) -> None:
    run = start()
    run.wait_until(run.saved)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT, run.said()
    assert "everything is saved" in run.said()
    assert "--nproc 2" in run.said()
    assert start().end() == 0
    assert run.lines() == whole


def test_what_all_ranks_refuse_is_said_once(start: Callable[..., Run]) -> None:
    run = start("run.batch=6", "run.microbatch=3", "model.num_experts=3")
    assert run.end() == 2
    assert run.said().count("ep = 2 does not divide model.num_experts = 3") == 1, run.said()
