import argparse
import sys
from pathlib import Path

import pytest

from evenload.train import ConfigError, cli, load_config
from evenload.train.errors import first_line

WRONG = [
    ("run.stepz=3", "unknown key 'run.stepz' (did you mean run.steps?)"),
    ("steps=3", "did you mean run.steps?"),
    ("run.steps=abc", "'abc' of type 'str' could not be converted to Integer"),
    ("run.steps=0", "run.steps = 0: must be at least 1"),
    ("run.seq_len=999", "longer than model.max_seq_len = 256"),
    ("run", "write it as key=value"),
    ("model=3", "is a section"),
    ("schedule.kind=cosin", "use one of cosine, wsd, constant (did you mean cosine?)"),
    ("data.sources=[{name: a, pth: x}]", "did you mean path?"),
    ("data.sources=[{name: a, kind: jsonl, path: x}, {name: a, kind: text, path: y}]", "names must differ"),
    ("data.sources=[{name: a, kind: csv, path: x}]", "use one of stdlib, text, jsonl, parquet, hub"),
    ("data.sources[7].weight=1", "there is no data.sources[7]"),
    ("data.sources[0].weight=0", "weight 0.0 must be above 0"),
    ("data.validation=1.5", "must be below 1"),
    ("model.balancers=eqq", "unknown balancer 'eqq'"),
    ("model.balancers=[{name: lei, coeff: -1}]", "lei"),
    ("model.top_k=99", "top_k must not exceed num_experts"),
    ("optim.lr=nan", "must be above 0"),
    ("optim.lr=inf", "must be a finite number"),
    ("data.sources[0].weight=.inf", "must be above 0 and finite"),
    ("data.sources.weight=1", "data.sources is a list; write data.sources[0].weight=..."),
    ("data.sources=[{name: a}]", "': data.sources[0].path: Structured config of type"),
    ("data.tokenizer_bytes=0", "must be at least 1"),
    ("model.score=foo", "model.score = 'foo': score='foo'; choose one of"),
    ("model.num_groups=3", "model.num_groups = 3: num_groups=3 and group_top_k=None; give both or neither"),
    ("model.group_top_k=3", "model.group_top_k = 3: num_groups=None and group_top_k=3"),
    ("model.balancers=qb_histogram+loss_free", "qb_histogram and loss_free both set the selection bias"),
    ("model.num_dense_layers=4", "leaves none of the 4 layers to experts"),
    ("run.threads=-1", "must be at least 1"),
    ("run.seed=-1", "must be at least 0 and below 2**32"),
    ("run.seed=4294967296", "must be at least 0 and below 2**32"),
    (f"run.out={__file__}", "is a file; name a folder"),
    (f"run.out={__file__}/inside", "is a file; name a folder"),
]


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_wrong_override_is_named_with_what_would_be_right(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", [override])
    assert message in str(caught.value)
    assert f"override {override!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  seed: 1\n  stepz: 3\n", "own.yaml:3: unknown key 'run.stepz' (did you mean run.steps?)"),
        ("runn:\n  steps: 3\n", "own.yaml:1: unknown section 'runn' (did you mean run?)"),
        ("run:\n  steps: many\n", "own.yaml:2: run.steps: Value 'many'"),
        ("run:\n  steps: 3\n  steps: 4\n", "own.yaml"),
        ("run: [3\n", "own.yaml:2: not valid YAML"),
        ("run: 3\n", "own.yaml:1: section 'run' must hold keys and values"),
        ("- a\n", "own.yaml: expected sections"),
        ("model:\n  vocab_size: 100\n", "own.yaml:2: model.vocab_size = 100"),
        ("model:\n  top_k: 99\n", "own.yaml:2: model: top_k=99"),
        ("word\n", "own.yaml: expected sections"),
        ("3\n", "own.yaml: expected sections"),
        ("run: {1: 2}\n", "own.yaml:1: '1' in section 'run': keys are plain words"),
        ("run: &run {steps: 3}\noptim:\n  <<: *run\n", "own.yaml:3: '<<' in section 'optim': keys are plain words"),
        ("data:\n  sources:\n  - {kind: text}\n", "own.yaml:2: data.sources[0].name: "),
        ("run:\n  out: caf\udce9\n", "own.yaml: cannot be read as UTF-8 text"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "own.yaml"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("")
    config = load_config(str(tmp_path / "own.yaml"))
    assert [source.name for source in config.data.sources] == ["code", "prose"]
    assert config.run.out == "runs/own"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("eqb+lei", "eqb+lei"),
        ("[{name: eqb}, {name: lei, coeff: 3e-2}]", [{"name": "eqb"}, {"name": "lei", "coeff": 0.03}]),
        ("[]", []),
    ],
)
def test_balancers_from_the_command_line(value: str, expected: object) -> None:
    assert load_config("tiny", [f"model.balancers={value}"]).model.balancers == expected


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_packaged_configurations_round_trip_through_yaml(name: str, tmp_path: Path) -> None:
    config = load_config(name, ["data.sources[1].weight=0.25", "run.threads=2"])
    assert config.data.sources[1].weight == 0.25
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(str(tmp_path / "again.yaml")) == config


def test_the_command_line_answers_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tinny"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("evenload: error: tinny: neither a file nor a packaged configuration")
    assert "did you mean tiny?" in error


@pytest.mark.parametrize("order", [["run.steps=7", "--print-config"], ["--print-config", "run.steps=7"]])
def test_print_config(order: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tiny", "run.threads=2", *order]) == 0
    shown = capsys.readouterr().out
    assert "steps: 7" in shown
    assert "threads: 2" in shown


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "tiny", "--print-config", "run.steps=7", "--fast"])
    assert "unrecognized arguments: --fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "overrides", "resume", "expected"),
    [
        (".venv/bin/evenload", ["run.steps=7"], "auto", ".venv/bin/evenload train my.yaml run.steps=7"),
        ("pytest", ["run.resume=auto"], "auto", "evenload train my.yaml run.resume=auto"),
        ("evenload", ["run.resume=a/b"], "a/b", "evenload train my.yaml run.resume=auto"),
        ("evenload", [], "never", "evenload train my.yaml run.resume=auto"),
        ("train/cli.py", [], "auto", f"{sys.executable} -m evenload.train.cli train my.yaml"),
    ],
)
def test_the_command_that_continues(
    typed: str, overrides: list[str], resume: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [typed])
    arguments = argparse.Namespace(config="my.yaml", overrides=overrides, nproc=None, max_restarts=0)
    assert cli.resume_command(arguments, resume) == expected


def test_first_lines_of_errors() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == first_line(ValueError("\n")) == "ValueError"
