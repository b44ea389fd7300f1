"""The README's example runs as it stands there, and stays short."""

import re
from pathlib import Path

import torch

import evenload

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_for_your_own_model():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 8
    d_model, num_experts, top_k = 8, 4, 2
    x = torch.randn(32, d_model)
    lines = code.splitlines()
    built = next(i for i, line in enumerate(lines) if line.startswith("router ="))
    scope = {"d_model": d_model, "num_experts": num_experts, "top_k": top_k, "x": x}
    exec("\n".join(lines[: built + 1]), scope)
    scope["model"] = torch.nn.Sequential(scope["router"])
    routed = next(i for i, line in enumerate(lines) if line.startswith("routing ="))
    exec(lines[routed], scope)
    scope["loss"] = scope["routing"].weights.mean()
    exec("\n".join(lines[routed + 1 :]), scope)
    assert scope["router"].weight.grad.abs().sum() > 0
    assert "MaxVio" in str(scope["report"])


def test_every_balancer_is_in_the_table():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", README, re.M))
    assert rows == {name: balancer.__name__ for name, balancer in evenload.BALANCERS.items()}


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@@|TODO|TBD", README)
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[1] / path).exists(), path
