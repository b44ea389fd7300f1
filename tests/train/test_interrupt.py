"""Signals: what the first one says, during an evaluation, and while data is prepared."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenload.train import Trainer, evaluation, load_config, loop
from evenload.train.corpus import Document, Source
from evenload.train.files import remove_stale
from evenload.train.interrupt import Interrupt, exit_on_sigterm
from evenload.train.monitor import read_metrics


@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, "press again"), (signal.SIGTERM, "send it again")])
def test_the_first_signal_is_answered(number: signal.Signals, again: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) == before
    assert interrupt.caught == number
    assert capfd.readouterr().err.strip() == f"finishing this step, then saving; {again} to abandon it"


@pytest.mark.parametrize("at", [1, 3], ids=["at step 4", "at the end"])
def test_an_interrupted_evaluation_is_made_up_for(mini: str, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two domains is never scored; the continued run has the lines of one that nobody interrupted."""

    def config(out: str) -> object:
        return load_config(mini, [f"run.out={tmp_path / out}", "run.eval_every=4"])

    def score_and_signal(*args: object) -> object:
        scored.append(1)
        if len(scored) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    def quiet(_: str) -> None:
        pass

    def lines(out: str) -> list[dict[str, object]]:
        return [{k: v for k, v in line.items() if k != "train/tokens_per_second"} for line in read_metrics(tmp_path / out)]

    scored: list[int] = []
    real = evaluation._score
    monkeypatch.setattr(evaluation, "_score", score_and_signal)
    outcome = Trainer(config("broken"), say=quiet).run()
    assert (outcome.interrupted, outcome.summary, len(scored)) == (signal.SIGINT, None, at)
    assert lines("broken")[-1]["step"] == {1: 4, 3: 8}[at]
    monkeypatch.setattr(evaluation, "_score", real)
    assert Trainer(config("broken"), say=quiet).run().summary is not None
    Trainer(config("whole"), say=quiet).run()
    assert lines("broken") == lines("whole")


def test_a_termination_while_data_is_prepared_leaves_nothing(
    mini: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def documents(self: Source) -> Iterator[Document]:
        for document in real(self):
            if list(cache.glob(".tokens-*")):
                os.kill(os.getpid(), signal.SIGTERM)
            yield document

    cache = tmp_path / "cache"
    real = Source.documents
    monkeypatch.setattr(Source, "documents", documents)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        Trainer(load_config(mini, [f"run.out={tmp_path}/run", f"data.cache={cache}"]), say=lambda _: None)
    assert caught.value.code == 128 + signal.SIGTERM
    assert [path.name for path in cache.iterdir() if path.name.startswith(".tok")] == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_handler_of_sigterm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        with exit_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]


def test_leftovers_of_kills_are_swept_after_a_day(mini: str, tmp_path: Path) -> None:
    yesterday = time.time() - 90_000
    for name in (".tokens-old.x", ".tokens-busy.x", ".tokens-new.x", "tokens-kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.bin").touch()
        if not name.startswith(".tokens-new"):
            os.utime(tmp_path / name, (yesterday, yesterday))
            os.utime(tmp_path / name / "training.bin", (yesterday, yesterday))
    (tmp_path / ".tokens-busy.x" / "training.bin").touch()
    (tmp_path / ".tokenizer-old").touch()
    os.utime(tmp_path / ".tokenizer-old", (yesterday, yesterday))
    remove_stale(tmp_path / "absent", ".tok*", 86_400)
    loop.load_data(load_config(mini, [f"data.cache={tmp_path}"]), lambda _: None)
    kept = {path.name for path in tmp_path.iterdir() if "x" in path.name or path.name in ("tokens-kept", ".tokenizer-old")}
    assert kept == {".tokens-busy.x", ".tokens-new.x", "tokens-kept"}
