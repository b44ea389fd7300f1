"""A balancer in a user's own file: the one that docs/your_own_balancer.md shows, run as it stands there."""

import re
from pathlib import Path

import torch

from evenload import Router, balance_step

PAGE = Path(__file__).parents[2] / "docs" / "your_own_balancer.md"


def pid_class():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S).group(1)
    scope: dict = {}
    exec(code, scope)
    return scope["PIDBias"], code


def test_it_is_short():
    _, code = pid_class()
    assert len([line for line in code.splitlines() if line.strip()]) <= 32


def test_it_balances_and_is_reported():
    pid, _ = pid_class()
    router = Router(None, 16, 2, balancers=[pid(), "lei"])
    logits = 0.5 * torch.randn(16) + torch.randn(4096, 16)
    history = []
    for _ in range(40):
        router(logits)
        report = balance_step(router)
        history.append(float(report.layers["maxvio"]))
    assert history[-1] < 0.1 * history[0]
    assert "pid_integral" in report.layers
    assert report.losses.keys() == {"lei"}


def pid_step(rank, group, parts):
    pid, _ = pid_class()
    router = Router(None, 6, 2, balancers=[pid()])
    for _ in range(2):
        router(parts[rank])
        balance_step(router, group)
    return router.balancers[0].bias


def test_it_is_global_without_a_line_about_ranks(ranks):
    logits = torch.randn(30, 6)
    alone = pid_step(0, None, [logits])
    for bias in ranks.run(3, pid_step, list(logits.split([4, 25, 1]))):
        assert torch.equal(bias, alone)


def test_its_state_is_saved_and_keeps_its_dtype():
    pid, _ = pid_class()
    router = Router(None, 6, 2, balancers=[pid()]).to(torch.bfloat16)
    assert {name: value.dtype for name, value in router.state_dict().items()} == {
        "balancers.pid.bias": torch.float32,
        "balancers.pid.integral": torch.float32,
    }
