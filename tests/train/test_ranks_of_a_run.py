"""A run over several ranks: the same training as in one process, and the same again after a restart, on any layout."""

import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

from evenload.train import ConfigError, Trainer, load_config
from evenload.train.interrupt import Interrupt
from evenload.train.monitor import read_metrics
from evenload.train.world import World

SETTINGS = ("run.batch=8", "run.eval_every=4", "run.save_every=2", "optim.lr=3e-3")
STEPS = 8


class Until(Trainer):
    """A run that is told to stop after some steps, and that notes which sequences it trains on."""

    until = STEPS

    def _agree_to_stop(self, interrupt: Interrupt) -> bool:
        if self.counters.step >= self.until < STEPS:
            self.stop = signal.SIGTERM
        return self.stop is not None


def train(
    rank: int, group: object, config: str, out: str, world: int, more: tuple[str, ...] = (), until: int = STEPS
) -> tuple[bool, list[tuple[str, int]]]:
    """Whether this rank has a summary to show, and (domain, number) of every training sequence that it read."""
    settings = [f"run.out={out}", f"run.steps={STEPS}", *SETTINGS, *more]
    trainer = Until(load_config(config, settings), world=World(rank, world, rank), say=lambda _: None)
    trainer.until = until
    read: list[tuple[str, int]] = []
    for store in trainer.data.mixture.stores:

        def noted(indices: Any, seq_len: int, store: Any = store, original: Any = store.read) -> Any:
            read.extend((store.name, int(index)) for index in indices)
            return original(indices, seq_len)

        store.read = noted
    return trainer.run().summary is not None, read


def lines(out: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "train/tokens_per_second"} for line in read_metrics(out)]


def assert_same_training(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Equal but for rounding, which now and then sends a token to another expert: norms feel that more than losses."""
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for one, other in zip(found, expected, strict=True):
        for key, value in other.items():
            if key.startswith(("train/", "validation/")):
                tolerance = 2e-2 if "norm" in key else 1e-3
                assert one[key] == pytest.approx(value, rel=tolerance), f"step {other['step']}: {key}"


@pytest.fixture(scope="module", params=["mixed", "domain"])
def mode(request: pytest.FixtureRequest) -> str:
    return f"data.mode={request.param}"


@pytest.fixture(scope="module")
def alone(mini: str, mode: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What one process records and reads."""
    out = tmp_path_factory.mktemp("alone") / "run"
    _, read = train(0, None, mini, str(out), 1, (mode,))
    return lines(out), read


@pytest.mark.parametrize("more", [(), ("parallel.ep=4",), ("parallel.dp_replicate=2", "parallel.ep=2")], ids=str)
def test_the_training_of_one_process(
    ranks: Ranks, mini: str, tmp_path: Path, more: tuple[str, ...], mode: str, alone: tuple[Any, Any]
) -> None:
    found = ranks.run(4, train, mini, str(tmp_path / "four"), 4, (mode, *more))
    assert [spoke for spoke, _ in found] == [True, False, False, False]
    assert_same_training(lines(tmp_path / "four"), alone[0])
    together = [sequence for _, read in found for sequence in read]
    assert sorted(together) == sorted(alone[1]), "each sequence once, none left out"


def test_the_same_ranks_continue_to_the_bit(ranks: Ranks, mini: str, tmp_path: Path) -> None:
    for out, stops in (("whole", (STEPS,)), ("broken", (3, 5, STEPS))):
        for until in stops:
            ranks.run(4, train, mini, str(tmp_path / out), 4, ("parallel.ep=2",), until)
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")


def test_other_ranks_continue_the_same_training(
    ranks: Ranks, mini: str, tmp_path: Path, mode: str, alone: tuple[Any, Any]
) -> None:
    """Four ranks with experts split in two, then two with whole ones, then one."""
    read: list[tuple[str, int]] = []
    for world, until, more in ((4, 3, ("parallel.ep=2",)), (2, 6, ())):
        for _, part in ranks.run(world, train, mini, str(tmp_path / "run"), world, (mode, *more), until):
            read += part
    read += train(0, None, mini, str(tmp_path / "run"), 1, (mode,))[1]
    assert_same_training(lines(tmp_path / "run"), alone[0])
    assert sorted(read) == sorted(alone[1]), "each sequence once, none left out"


def test_batches_that_ranks_cannot_share_are_refused(mini: str, tmp_path: Path) -> None:
    config = load_config(mini, [f"run.out={tmp_path}", "run.batch=8"])
    with pytest.raises(ConfigError, match=r"run\.batch = 8: 3 ranks with microbatches of .* need a multiple of 6"):
        Trainer(config, world=World(0, 3, 0))
