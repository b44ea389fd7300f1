"""`evenload check` as a user types it."""

import json
from pathlib import Path

import pytest

from evenload.train.cli import main

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(TESTS)
    monkeypatch.setenv("COLUMNS", "100")


def test_a_sound_router_passes(capsys):
    assert main(["check", "evenload:eqb+lei", "--rows", "1,4,13,16"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "evenload:eqb+lei"
    assert " 4  eval leak     pass  eval forwards leave every buffer" in out
    assert "16  packing       n/a   nothing here works per sequence or document" in out
    assert out.rstrip().endswith("3 passed, 0 failed, 1 not applicable")
    assert max(map(len, out.splitlines())) <= 100


def test_a_failure_shows_its_evidence_and_the_remedy(capsys):
    assert main(["check", "my_router:BiasRouter", "--rows", "7"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "7 dtype FAIL expert_bias becomes bfloat16 after model.to(bfloat16)" in lines
    assert "remedy: keep the dtype of balancing buffers in _apply, and count in integers" in lines


def test_several_targets_side_by_side(capsys):
    sequence = "evenload:[{name: gshard, scope: sequence}]"
    assert main(["check", "--markdown", sequence, "my_router:TopKRouter", "--rows", "11,16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| # | row | `{sequence}` | `my_router:TopKRouter` |"
    assert lines[2:4] == ["| 11 | ties | pass | **FAIL** |", "| 16 | packing | pass | n/a |"]
    assert lines[-1].startswith("* **11 ties**, `my_router:TopKRouter`: of 8 experts")


def test_json(capsys):
    assert main(["check", "--json", "my_router:TopKRouter", "--rows", "3,11"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(each["row"], each["status"]) for each in found] == [(3, "pass"), (11, "fail")]
    assert found[0]["remedy"] is None
    assert "stable sort" in found[1]["remedy"]


def test_the_list_of_rows_needs_no_target(capsys):
    assert main(["check", "--list"]) == 0
    out = capsys.readouterr().out
    assert "26  tensor parallelism" in out
    assert "(transformers#28505," in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no target; for instance evenload:eqb+lei"),
        (["evenload:eqp"], "unknown balancer 'eqp'; did you mean 'eqb'?"),
        (["evenload:[{name: lei"], "is no YAML list"),
        (["mixtral"], "write evenload:BALANCERS, transformers:ARCHITECTURE, or my_module:MyRouter"),
        (["my_router:Nobody"], "has no Nobody"),
        (["evenload:eqb", "--rows", "1,x"], "--rows 1,x; give row numbers"),
        (["evenload:eqb", "--rows", "27"], "no row 27"),
    ],
)
def test_mistakes_cost_one_line(arguments, message, capsys):
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
