"""Every example runs, with few steps, and does what it says."""

import difflib
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_all_are_here():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"hf_trainer.py", "plain_pytorch.py", "plain_pytorch_unbalanced.py", "your_own_balancer.py"}


def test_plain_pytorch_is_four_lines_away_from_a_plain_script(run):
    before, after = (code_of(name) for name in ("plain_pytorch_unbalanced.py", "plain_pytorch.py"))
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(new) == 4
    assert len(after) <= 60
    busiest = [float(re.findall(r"expert: ([\d.]+)", run(name, "--steps", "21"))[-1]) for name in
               ("plain_pytorch_unbalanced.py", "plain_pytorch.py")]  # fmt: skip
    assert busiest[1] < busiest[0]


def code_of(name: str) -> list[str]:
    """Lines of code, without the docstring and blank lines."""
    code = (EXAMPLES / name).read_text().split('"""', 2)[2]
    return [line for line in code.splitlines() if line.strip()]


@pytest.mark.parametrize("balancers", ["eqb+lei", "none"])
def test_the_hugging_face_trainer(run, balancers):
    printed = run("hf_trainer.py", "--steps", "3", "--balancers", balancers)
    assert "'maxvio'" in printed
    assert re.search(r"^model\.layers\.1\.mlp\.gate", printed, re.M)


def test_your_own_balancer(run):
    rows = [line.split() for line in run("your_own_balancer.py", "--steps", "12").splitlines()[1:]]
    assert float(rows[-1][1]) < 0.2 * float(rows[0][1])
