"""2N steps equal N steps, a kill, and N more: to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evenload.train import ConfigError, Trainer, checkpoint, cli, load_config, loop
from evenload.train.checkpoint import Checkpointer, list_checkpoints
from evenload.train.lock import only_run
from evenload.train.monitor import read_metrics
from evenload.train.shards import read_index, read_shards

STEPS, EVERY = 60, 15
SETTINGS = [f"run.steps={STEPS}", f"run.save_every={EVERY}", "run.eval_every=20", "run.image_every=25"]


def command(mini: str, out: Path, mode: str) -> list[str]:
    return ["train", mini, f"run.out={out}", *SETTINGS, f"data.mode={mode}"]


def steps_done(out: Path) -> int:
    return len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").exists() else 0


def lines(out: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if k != "train/tokens_per_second"} for line in read_metrics(out)]


def newest_step(out: Path) -> int:
    return Checkpointer(out / "checkpoints").newest()[0].step


def assert_same_state(one: Path, other: Path) -> None:
    extras, tensors = [], []
    for folder in (one, other):
        found, _ = Checkpointer(folder / "checkpoints").newest()
        found.extra["config"]["run"].pop("out")
        extras.append(found.extra)
        index = read_index(found.path)
        tensors.append({name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in index.items()})
        read_shards(found.path, tensors[-1], None)
    assert extras[0] == extras[1]
    assert tensors[0].keys() == tensors[1].keys()
    assert [name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])] == []


@pytest.mark.parametrize("mode", ["mixed", "domain"])
def test_kill_and_resume_equals_a_run_without_a_break(
    mini: str, tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert cli.main(command(mini, whole, mode)) == 0
    program = [sys.executable, "-m", "evenload.train.cli", *command(mini, broken, mode)]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list_checkpoints(broken / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert newest_step(broken) < STEPS

    capsys.readouterr()
    assert cli.main(command(mini, broken, mode)) == 0
    assert "continuing after step" in capsys.readouterr().out
    assert lines(broken) == lines(whole)
    assert len({line["step"] for line in lines(whole)}) == STEPS
    assert_same_state(whole, broken)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(
    mini: str, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config() -> object:
        return load_config(mini, [f"run.out={tmp_path / 'run'}", "run.save_every=0"])

    said: list[str] = []
    before = signal.getsignal(number)
    real = loop.train_step

    def step_and_signal(*args: object, **kwargs: object) -> object:
        trainer_steps.append(1)
        if len(trainer_steps) == 3:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    trainer_steps: list[int] = []
    monkeypatch.setattr(loop, "train_step", step_and_signal)
    outcome = Trainer(config(), "evenload train mini.yaml run.steps=8", said.append).run()
    assert (outcome.interrupted, outcome.summary) == (number, None)
    assert "stopped after step 3 of 8" in said[-2]
    assert said[-1] == "continue with:\n  evenload train mini.yaml run.steps=8"
    assert signal.getsignal(number) == before
    assert newest_step(tmp_path / "run") == 3

    monkeypatch.setattr(loop, "train_step", real)
    assert Trainer(config(), say=said.append).run().summary is not None
    whole = load_config(mini, [f"run.out={tmp_path / 'whole'}", "run.save_every=0"])
    Trainer(whole, say=said.append).run()
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(mini: str, tmp_path: Path) -> None:
    config = load_config(mini, [f"run.out={tmp_path / 'run'}"])
    said: list[str] = []
    Trainer(config, say=said.append).run()
    before = lines(tmp_path / "run")
    os.truncate(tmp_path / "run/checkpoints/step-00000008/__0_0.distcp", 1000)
    Trainer(config, say=said.append).run()
    assert any("refused checkpoint" in text and "step-00000008" in text for text in said)
    assert any("continuing after step 4" in text for text in said)
    assert lines(tmp_path / "run") == before


def test_a_finished_run_is_only_summarised_again(mini: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(mini, [f"run.out={tmp_path / 'run'}", "run.steps=3"])
    first = Trainer(config, say=lambda _: None).run()
    monkeypatch.setattr(loop, "train_step", lambda *_, **__: pytest.fail("trained again"))
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = Trainer(config, say=lambda _: None).run()
    assert again.summary.table() == first.summary.table()
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_a_checkpoint_of_another_run_is_refused(mini: str, tmp_path: Path) -> None:
    shape = [f"run.out={tmp_path}", "data.mode=domain"]
    Trainer(load_config(mini, [*shape, "run.steps=1"]), say=lambda _: None).run()
    for override, message in [
        ("model.num_experts=8", "model.num_experts was 4 and is now 8"),
        ("run.seed=1", "run.seed was 0 and is now 1"),
        ("data.mode=mixed", "data.mode was 'domain' and is now 'mixed'"),
        ("run.microbatch=1", "run.microbatch was 2 and is now 1"),
        ("optim.decay_embeddings=true", "optim.decay_embeddings was False and is now True"),
        ("run.resume=never", "run.resume = never, but"),
    ]:
        with pytest.raises(ConfigError) as caught:
            Trainer(load_config(mini, [*shape, "run.steps=2", override]), say=lambda _: None)
        assert message in str(caught.value)


def test_changed_options_are_said_and_take_effect(mini: str, tmp_path: Path) -> None:
    Trainer(load_config(mini, [f"run.out={tmp_path}", "run.steps=1"]), say=lambda _: None).run()
    said: list[str] = []
    changes = ["optim.beta2=0.5", "optim.eps=1e-3", "optim.weight_decay=7", "run.steps=2", "run.microbatch=1"]
    trainer = Trainer(load_config(mini, [f"run.out={tmp_path}", *changes, "run.log_every=5"]), say=said.append)
    assert (
        "changed since the checkpoint: optim.beta2 0.95 -> 0.5, optim.eps 1e-08 -> 0.001, optim.weight_decay 0.1 -> 7.0, "
        "run.steps 1 -> 2, run.microbatch 2 -> 1"
    ) in said
    trainer.run()
    groups = trainer.optimizer.param_groups
    assert [(group["betas"][1], group["eps"], group["weight_decay"]) for group in groups] == [(0.5, 1e-3, 7), (0.5, 1e-3, 0)]


def test_resume_from_a_path(mini: str, tmp_path: Path) -> None:
    Trainer(load_config(mini, [f"run.out={tmp_path / 'a'}"]), say=lambda _: None).run()
    path = tmp_path / "a/checkpoints/step-00000004"
    branch = load_config(mini, [f"run.out={tmp_path / 'b'}", f"run.resume={path}"])
    Trainer(branch, say=lambda _: None).run()
    assert lines(tmp_path / "b") == [line for line in lines(tmp_path / "a") if line["step"] > 4]
    with pytest.raises(checkpoint.CheckpointError, match="no such folder"):
        Trainer(load_config(mini, [f"run.out={tmp_path / 'c'}", "run.resume=/nowhere"]), say=lambda _: None)
    path.rename(tmp_path / "z-copy")
    with pytest.raises(ConfigError, match="newer checkpoints"):
        Trainer(load_config(mini, [f"run.out={tmp_path / 'a'}", f"run.resume={tmp_path}/z-copy"]), say=lambda _: None)

    last = load_config(mini, [f"run.out={tmp_path / 'd'}", f"run.resume={tmp_path}/a/checkpoints"])
    summary = Trainer(last, say=lambda _: None).run().summary
    assert [row.measure for row in summary.rows] == [f"validation bits per byte, {name}" for name in ("words", "numbers")]
    assert "no record of the training steps" in (tmp_path / "d/summary.md").read_text()
    assert [path.name for path in list_checkpoints(tmp_path / "d/checkpoints")] == ["step-00000008"], "goes on by itself"


def test_a_folder_has_one_run_at_a_time(mini: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with only_run(tmp_path):
        assert cli.main(["train", mini, f"run.out={tmp_path}", "run.steps=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"evenload: error: another evenload is running in {tmp_path}; ")
    assert error.count("\n") == 1
    with only_run(tmp_path):
        pass


def test_a_metrics_file_cut_by_a_kill_is_mended(mini: str, tmp_path: Path) -> None:
    config = load_config(mini, [f"run.out={tmp_path}", "run.steps=3"])
    Trainer(config, say=lambda _: None).run()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    Trainer(config, say=lambda _: None).run()
    assert all(json.loads(line)["step"] <= 3 for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
