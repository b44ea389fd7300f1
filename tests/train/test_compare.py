"""`evenload compare` as a user runs it: the plan, the runs, what a kill leaves, the tables and the page."""

import csv
import html
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenload.train import cli
from evenload.train.compare.plan import make_plan
from evenload.train.compare.report import text_table
from evenload.train.config_file import load_config
from evenload.train.monitor import read_layers, read_metrics

PROGRAM = [sys.executable, "-m", "evenload.train.cli"]
SAFE = os.environ | {"PYTHONSAFEPATH": "1"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def labels(mini: str, *overrides: str) -> list[str]:
    return [variant.label for variant in make_plan(mini, overrides).variants]


def test_by_default_the_configurations_own_beside_none_and_gshard(mini: str) -> None:
    assert labels(mini) == ["none", "gshard", "eqb+lei"]
    assert labels(mini, "model.balancers=gshard") == ["none", "gshard"]
    assert labels(mini, "model.balancers=[{name: eqb, space: scores}]")[-1] == "eqb(space=scores)"


def test_a_sweep_takes_every_combination_of_what_a_balancer_has(mini: str) -> None:
    sweep = "sweep={lei.coeff: [0.1, 0.3], eqb.space: [scores, logits], optim.lr: [1e-3, 1e-2]}"
    found = make_plan(mini, ["balancers=[none, lei, eqb+lei]", sweep]).variants
    assert [variant.method for variant in found] == ["none"] * 2 + ["lei"] * 4 + ["eqb+lei"] * 8
    assert found[0].label == "none optim.lr=0.001"
    assert found[-1].label == "eqb(space=logits)+lei(coeff=0.3) optim.lr=0.01"
    assert found[-1].settings == {"lei.coeff": 0.3, "eqb.space": "logits", "optim.lr": 0.01}
    assert len({run.folder for run in make_plan(mini, ["balancers=[none, lei, eqb+lei]", sweep]).runs}) == 14


def test_the_command_of_a_run_trains_that_run(mini: str) -> None:
    plan = make_plan(
        mini,
        ["balancers=[eqb, [{name: phi, potential: [lp, 3]}]]", "seeds=[3]", "optim.lr=0.02", "sweep={eqb.space: [scores]}"],
    )
    for run in plan.runs:
        program, command, name, *overrides = shlex.split(run.command)
        alone = load_config(name, overrides)
        assert (program, command) == ("evenload", "train")
        assert replace(alone, run=replace(alone.run, out=str(run.folder))) == run.config
        assert (alone.run.seed, alone.optim.lr) == (3, 0.02)


def test_a_configuration_may_say_what_it_compares(mini: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(Path(mini).read_text() + "compare: {balancers: [qb, eqb], seeds: [1, 2], baseline: eqb}\n")
    plan = make_plan(str(path), [])
    assert [run.name for run in plan.runs] == ["qb, seed 1", "eqb, seed 1", "qb, seed 2", "eqb, seed 2"]
    assert plan.baseline.label == "eqb"
    assert load_config(str(path)) == replace(load_config(mini), run=load_config(str(path)).run)  # to train it is one run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("balancers=[eqbb]", r"unknown balancer 'eqbb'; did you mean 'eqb'"),
        ("balancers=[[{coeff: 1}]]", r"compare.balancers: \{'coeff': 1\}: give a name such as eqb\+lei"),
        ("balancers=eqb", "compare.balancers"),
        ("seeds=[]", "at least one seed"),
        ("seeds=[a]", "compare.seeds"),
        ("seeds=[-1]", "run.seed = -1"),
        ("sweep={lei.coef: [1]}", r"balancer 'lei' has no option 'coef'"),
        ("sweep={lei.coeff: []}", r"lei.coeff: \[\] has no values"),
        ("sweep={phi.coeff: [1]}", "no balancer of the comparison is phi"),
        ("sweep={lie.coeff: [1]}", r"lie.coeff: write balancer.option or section.key"),
        ("sweep={optim.lrr: [1]}", r"optim.lrr.*did you mean optim.lr"),
        ("baseline=ebq", r"not among those compared.*: none, gshard, eqb\+lei"),
        ("jobs=0", "compare.jobs = 0: must be at least 1"),
        ("turns=-1", "compare.turns = -1: must be at least 0"),
        ("run.out=x", "has its own folder; name the comparison's with out=PATH"),
        ("run.seed=1", r"seeds=\[0,1,2\]"),
        ("parallel.ep=2", "parallel"),
        ("seed=1", "'seed'"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_a_line(
    mini: str, override: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", mini, override]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def finished(mini: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two balancers and a sweep, two seeds."""
    out = tmp_path_factory.mktemp("comparison") / "both"
    assert cli.main(command(mini, out)) == 0
    return out


def command(mini: str, out: Path) -> list[str]:
    settings = ["balancers=[none, lei]", "seeds=[0, 1]", "sweep={lei.coeff: [0.1, 1.0]}", "turns=2", "jobs=2"]
    return ["compare", mini, *settings, f"out={out}", "run.image_every=2", "model.measure_residual=true"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_per_run_with_what_its_folder_says(finished: Path) -> None:
    found = rows(finished / "results.csv")
    assert [(row["label"], row["seed"], row["lei.coeff"]) for row in found] == [
        (label, seed, coeff)
        for seed in "01"
        for label, coeff in (("none", ""), ("lei(coeff=0.1)", "0.1"), ("lei(coeff=1.0)", "1.0"))
    ]
    for row in found:
        folder = finished / "runs" / row["label"] / f"seed-{row['seed']}"
        steps = [line for line in read_metrics(folder) if "train/loss" in line and line["step"] > 6]  # the last quarter of 8
        mean = sum(line["balance/maxvio/mean"] for line in steps) / len(steps)
        assert float(row["maxvio_global"]) == pytest.approx(mean, rel=1e-5)
        losses = [score["loss"] for score in json.loads((folder / "summary.json").read_text())["validation"].values()]
        assert float(row["validation_loss"]) == pytest.approx(sum(losses) / 2, rel=1e-5)
        assert row["intervention"] == ""  # no bias
    layers = rows(finished / "layers.csv")
    assert len(layers) == 6 * 2
    for row in found:
        mine = [float(layer["maxvio"]) for layer in layers if (layer["label"], layer["seed"]) == (row["label"], row["seed"])]
        assert float(row["maxvio_global"]) == pytest.approx(sum(mine) / 2, rel=1e-4)


def test_a_seed_is_the_same_beginning_for_all(finished: Path) -> None:
    first = {
        row["label"] + row["seed"]: read_metrics(finished / "runs" / row["label"] / f"seed-{row['seed']}")[0]
        for row in rows(finished / "results.csv")
    }
    for seed in "01":
        assert len({first[label + seed]["train/loss"] for label in ("none", "lei(coeff=0.1)", "lei(coeff=1.0)")}) == 1
    assert first["none0"]["train/loss"] != first["none1"]["train/loss"]
    assert first["none0"]["train/router_grad_norm"] != first["lei(coeff=1.0)0"]["train/router_grad_norm"]


def test_windows_hold_the_load_of_their_steps(finished: Path) -> None:
    folder = finished / "runs" / "none" / "seed-0"
    windows = read_layers(folder)
    assert [(window["step"], window["steps"]) for window in windows] == [(2, 2), (4, 2), (6, 2), (8, 2)]
    per_step = [line["balance/maxvio/mean"] for line in read_metrics(folder) if "train/loss" in line]
    for number, window in enumerate(windows):
        assert [sum(layer) for layer in window["load"]] == [2 * 4 * 32 * 2] * 2  # steps x sequences x tokens x top_k
        assert sum(window["maxvio"]) / 2 == pytest.approx(sum(per_step[2 * number : 2 * number + 2]) / 2)
        assert window["intervention"] == [None, None]


def test_what_is_finished_is_not_trained_again(finished: Path, mini: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.glob("runs/*/*/metrics.jsonl")}
    table = (finished / "results.csv").read_bytes()
    assert cli.main(command(mini, finished)) == 0
    said = capsys.readouterr().out
    assert "0 of 6 runs to train" in said
    assert "timing" not in said
    assert len(before) == 6
    assert before == {path: path.stat().st_mtime_ns for path in finished.glob("runs/*/*/metrics.jsonl")}
    assert (finished / "results.csv").read_bytes() == table
    assert cli.main([*command(mini, finished), "optim.lr=0.5"]) == 2
    assert "was made with optim.lr = 0.01, now it is 0.5; choose another out=PATH" in capsys.readouterr().err


def test_hparams_of_every_run(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    folders = sorted({path.parent for path in (finished / "hparams").rglob("events*")})
    assert len(folders) == 6
    for folder in folders:
        board = EventAccumulator(str(folder)).Reload()
        content = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
        assert started["balancers"].string_value == folder.parent.name
        assert started["seed"].number_value == int(folder.name[-1])
        assert board.Scalars("result/validation_loss")[0].value > 0


def test_the_page_holds_everything_and_asks_nobody(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "http" not in re.sub(r"data:[^\"]*", "", page)
    assert len(page) < 1_000_000
    for row in rows(finished / "results.csv"):
        assert html.escape(row["command"]).replace("&#x27;", "&#39;") in page
    assert page.count("<img") == 2 + 2 + 1 + 3  # trade-offs, curves, scale, heat maps
    assert "2 of" not in page.split("<h2>")[0]


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return found


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(finished: Path, tmp_path: Path, width: int) -> None:
    """A phone and a desk: every picture is decoded, nothing is wider than the screen but what scrolls by itself."""
    page = (finished / "report.html").read_text()
    probe = """
      const page = document.querySelector("iframe").contentDocument;
      const pictures = [...page.images].filter(image => image.complete && image.naturalWidth > 0).length;
      const wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
      const small = [...page.querySelectorAll("figure img")].filter(image => image.getBoundingClientRect().width < 100).length;
      const cells = [...page.querySelectorAll("td")].filter(cell => cell.getBoundingClientRect().height > 0).length;
      document.title = JSON.stringify({pictures, wide, small, cells});
    """
    frame = (
        f'<iframe width="{width}" height="2000" srcdoc="{html.escape(page)}" onload=\'{probe.replace(chr(39), "")}\'></iframe>'
    )
    (tmp_path / "probe.html").write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{frame}</body>")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--virtual-time-budget=5000",
    ]
    done = subprocess.run(
        [browser(), *options, "--dump-dom", (tmp_path / "probe.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    seen = json.loads(html.unescape(title[1]))
    columns = page.count('scope="col"')
    assert seen == {"pictures": 8, "wide": 0, "small": 0, "cells": (columns - 1) * 4}


def test_one_run_that_fails_stops_no_other(mini: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "balancers=[none]",
        "sweep={optim.lr: [1e-2, 1e38]}",
        "run.max_bad_steps=1",
        "optim.clip=0",
        "run.steps=4",
        "turns=0",
    ]
    assert cli.main(["compare", mini, f"out={tmp_path}/c", *settings]) == 1
    said = capsys.readouterr()
    assert "1 runs failed; try them again with:\n  evenload compare" in said.err
    assert [row["optim.lr"] for row in rows(tmp_path / "c" / "results.csv")] == ["0.01"]
    page = (tmp_path / "c" / "report.html").read_text()
    assert "1 of 2 runs are not in this report" in page
    assert re.search(r"none optim.lr=1\.0e\+38, seed 0: stopped at step \d: 1 steps in a row had a non-finite", page)


def test_without_a_finished_run_the_table_says_so(mini: str) -> None:
    assert text_table(make_plan(mini, []), {}, {}) == "no run has finished"


def test_killed_and_stopped_it_ends_as_if_nothing_had_been(mini: str, tmp_path: Path) -> None:
    """kill -9: the runs notice, save and go. SIGTERM: they are told. In the end the tables are those of a run in peace."""
    settings = [
        "balancers=[none]",
        "seeds=[0, 1]",
        "turns=0",
        "jobs=2",
        "run.steps=150",
        "run.save_every=1000",
        "run.image_every=1000",
    ]
    peace, war = tmp_path / "peace", tmp_path / "war"
    assert cli.main(["compare", mini, f"out={peace}", *settings]) == 0
    again = [*PROGRAM, "compare", mini, f"out={war}", *settings]

    first = subprocess.Popen(again, env=SAFE, stderr=subprocess.DEVNULL)
    wait(lambda: len(list(war.glob("runs/*/*/metrics.jsonl"))) == 2 and all(map(some_steps, war.glob("runs/*/*"))))
    first.kill()
    first.wait()
    wait(lambda: len(list(war.glob("runs/*/*/checkpoints/step-*"))) == 2)
    assert not list(war.glob("runs/*/*/summary.json"))

    second = subprocess.Popen(again, env=SAFE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    wait(lambda: all("continuing after step" in (folder / "log.txt").read_text() for folder in war.glob("runs/*/*")))
    second.send_signal(signal.SIGTERM)
    said = second.communicate(timeout=60)[0]
    assert second.returncode in (0, 128 + signal.SIGTERM)
    if second.returncode:
        assert "Continue with:\n  evenload compare" in said
    assert cli.main(["compare", mini, f"out={war}", *settings]) == 0
    for name in ("results.csv", "layers.csv"):
        assert numbers(war / name) == numbers(peace / name)


def some_steps(folder: Path) -> bool:
    return len((folder / "metrics.jsonl").read_text().splitlines()) > 10


def numbers(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows(path)]


def wait(condition: Any) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)
