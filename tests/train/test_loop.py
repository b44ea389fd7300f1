"""Whole runs of the miniature configuration through the command line."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.filesystem import FileSystem

from evenload.train import Score, cli, load_config, loop, progress
from evenload.train.checkpoint import Checkpointer
from evenload.train.monitor import read_metrics
from evenload.train.summary import write_summary


def keys(out: Path) -> set[str]:
    return {key for line in read_metrics(out) for key in line}


def test_a_run_from_the_command_line(mini: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert cli.main(["train", mini, f"run.out={out}", "run.eval_every=4"]) == 0
    shown = capsys.readouterr()
    assert f"table    {out}/summary.md" in shown.out
    assert f"picture  {out}/summary.png" in shown.out
    assert (out / "summary.md").read_text().strip() in shown.out
    assert "step 8/8  loss" in shown.err
    assert (out / "summary.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((out / "summary.json").read_text())["rows"]
    for measure in ("validation bits per byte, words", "validation bits per byte, numbers", "global MaxVio", "local MaxVio"):
        assert rows[measure]["value"] > 0
    assert rows["intervention rate"]["fair_random_router"] == 0.5
    assert rows["global MaxVio"]["fair_random_router"] < rows["local MaxVio"]["fair_random_router"]
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.yaml",
        "layers.jsonl",
        "metrics.jsonl",
        "summary.json",
        "summary.md",
        "summary.png",
        "tensorboard",
        "tokenizer.json",
    ]
    losses = [line["train/loss"] for line in read_metrics(out) if "train/loss" in line]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    validation = json.loads((out / "summary.json").read_text())["validation"]
    sequences = 256 // 32
    assert {name: [sum(layer) for layer in score["load"]] for name, score in validation.items()} == dict.fromkeys(
        ("words", "numbers"), [sequences * 32 * 2] * 2
    ), "sequences x tokens x top-k, in both layers"


def test_keys_do_not_grow_with_the_model(mini: str, tmp_path: Path) -> None:
    for layers, experts in ((1, 4), (3, 8)):
        out = tmp_path / f"{layers}"
        model = [f"model.num_layers={layers}", f"model.num_experts={experts}"]
        assert cli.main(["train", mini, f"run.out={out}", "run.steps=2", *model]) == 0
    assert keys(tmp_path / "1") == keys(tmp_path / "3")
    assert len(keys(tmp_path / "1")) < 80
    assert {"balance/maxvio/max", "balance_loss/lei", "train/router_grad_norm", "validation/loss/words"} <= keys(tmp_path / "3")
    board = EventAccumulator(str(tmp_path / "3" / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == keys(tmp_path / "3") - {"step"}
    assert board.Tags()["images"] == ["balance/load"]


def test_without_a_bias_the_intervention_rate_is_not_applicable(mini: str, tmp_path: Path) -> None:
    assert cli.main(["train", mini, f"run.out={tmp_path}", "run.steps=2", "model.balancers=gshard"]) == 0
    table = (tmp_path / "summary.md").read_text()
    assert re.search(r"^\| intervention rate +\| +n/a \|", table, re.MULTILINE)


def test_dropped_tokens_are_counted(mini: str, tmp_path: Path) -> None:
    model = ["model.capacity_factor=0.5", "model.balancers=none", "model.measure_residual=true"]
    assert cli.main(["train", mini, f"run.out={tmp_path}", "run.steps=2", *model]) == 0
    assert all(line["train/dropped"] > 0 for line in read_metrics(tmp_path) if "train/loss" in line)
    assert "dropped assignments per step" in (tmp_path / "summary.md").read_text()


def test_what_is_recorded_now_and_then_is_that_steps_own(mini: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step is recorded: the same values as when all are, and the terminal keeps the last known MaxVio. Validation
    loss has no z-loss, so the training loss beside it has none either."""
    shown: list[str] = []
    monkeypatch.setattr(progress.Progress, "update", lambda self, step, state: shown.append(state[1]))
    lines: list[dict[int, dict[str, float]]] = []
    for every in (1, 3):
        settings = [f"run.out={tmp_path}/{every}", f"run.log_every={every}", "run.steps=6"]
        settings += ["model.capacity_factor=0.5", "model.z_loss=0.1"]
        assert cli.main(["train", mini, *settings]) == 0
        found = [line for line in read_metrics(tmp_path / str(every)) if "train/loss" in line]
        lines.append({line["step"]: {k: v for k, v in line.items() if k != "train/tokens_per_second"} for line in found})
    assert lines[1] == {step: lines[0][step] for step in (3, 6)}
    known = [lines[1][step]["balance/maxvio/mean"] for step in (3, 6)]
    assert shown[8:] == [f"MaxVio {value:.2f}" for value in [known[0]] * 3 + [known[1]]]
    first = lines[0][1]
    assert first["train/loss"] == pytest.approx(math.log(300), rel=0.05)
    assert first["train/objective"] > first["train/loss"] + 1


def test_a_run_that_begins_again_leaves_no_old_events(mini: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError
        return real(*args, **options)

    calls: list[int] = []
    real = loop.train_step
    monkeypatch.setattr(loop, "train_step", broken)
    command = ["train", mini, f"run.out={tmp_path}", "run.save_every=0", "run.steps=5"]
    with pytest.raises(MemoryError):
        cli.main(command)
    assert cli.main(command) == 0
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_a_full_disk_ends_the_run_in_one_line(
    mini: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileSystem.create_stream

    @contextmanager
    def full(self: FileSystem, path: Path, mode: str) -> Iterator[object]:
        with real(self, Path("/dev/full") if "step-00000008" in str(path) else path, mode) as stream:
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", full)
    assert cli.main(["train", mini, f"run.out={tmp_path}"]) == 1
    [error] = [line for line in capsys.readouterr().err.splitlines() if "evenload: error" in line]
    assert "step-00000008: cannot be written: [Errno 28] No space left on device; the newest checkpoint is" in error
    assert "step-00000004. Make room" in error
    monkeypatch.undo()
    assert cli.main(["train", mini, f"run.out={tmp_path}"]) == 0


def test_a_diverged_run_stops_with_a_reason(mini: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["optim.lr=1e30", "optim.clip=0", "schedule.warmup=0", "run.max_bad_steps=3", "run.steps=50"]
    assert cli.main(["train", mini, f"run.out={tmp_path}", *settings]) == 1
    error = capsys.readouterr().err
    assert "3 steps in a row had a non-finite loss or gradient" in error
    assert "skipped (1 in a row, 1 in all)" in error
    assert "Traceback" not in error
    last = read_metrics(tmp_path)[-1]
    assert last["train/bad_steps"] == 3
    assert last["train/grad_norm"] is None, "not a number that JSON has"
    assert "train/dropped" not in last
    assert Checkpointer(tmp_path / "checkpoints").newest()[0].step == last["step"], "good steps before the bad ones are kept"
    assert cli.main(["train", mini, f"run.out={tmp_path}", *settings, f"run.steps={last['step'] + 2}"]) == 0, (
        "two bad steps are two in a row, not five"
    )


def test_sources_that_are_too_small_are_refused_in_one_line(
    mini: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.txt").write_text("one\ntwo\nthree\n")
    source = f"data.sources=[{{name: few, kind: text, path: {tmp_path}/few.txt, sample_by: line}}]"
    assert cli.main(["train", mini, f"run.out={tmp_path}/run", source, "data.validation=0.5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evenload: error: data.sources: few: ")
    assert error.count("\n") == 1

    longer = ["model.max_seq_len=1024", "run.seq_len=1024", "run.eval_tokens=1024"]
    assert cli.main(["train", mini, f"run.out={tmp_path}/run", "data.validation=0.02", *longer]) == 2
    error = capsys.readouterr().err
    assert "validation tokens do not fill one sequence of 1024; raise data.validation, or shorten run.seq_len" in error
    assert error.count("\n") == 1


def test_numbers_that_json_lacks_are_null_in_the_summary(mini: str, tmp_path: Path) -> None:
    scores = {"words": Score(math.inf, math.nan, 1, 1, np.ones((2, 4), dtype=np.int64))}
    summary = write_summary(load_config(mini, ["run.steps=2"]), scores, _without_steps(tmp_path))
    facts = json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert facts["validation"]["words"]["loss"] is None
    assert "holds no record of the training steps" in summary.table()


def _without_steps(folder: Path) -> Path:
    (folder / "metrics.jsonl").write_text("")
    return folder
