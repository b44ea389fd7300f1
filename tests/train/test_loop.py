"""Whole runs of the miniature configuration through the command line."""

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evenload.train import cli
from evenload.train.monitor import read_metrics


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
        "checkpoints",
        "config.yaml",
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


def test_sources_that_are_too_small_are_refused_in_one_line(
    mini: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.txt").write_text("one\ntwo\nthree\n")
    source = f"data.sources=[{{name: few, kind: text, path: {tmp_path}/few.txt, sample_by: line}}]"
    assert cli.main(["train", mini, f"run.out={tmp_path}/run", source, "data.validation=0.5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evenload: error: data.sources: few: ")
    assert error.count("\n") == 1
