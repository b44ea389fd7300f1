from pathlib import Path

import pytest

from evenload.train import ConfigError, cli, load_config

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
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
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


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tiny", "run.steps=7", "--print-config"]) == 0
    assert "steps: 7" in capsys.readouterr().out
