"""The adapter that docs/conformance.md shows, run as it stands there."""

import re
from pathlib import Path
from types import SimpleNamespace

import torch

from evenload.balancers.conformance import ROWS, run_suite

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()


class MyRouter(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = torch.nn.Linear(config.hidden, config.experts, bias=False)
        self.k = config.k

    def forward(self, x):
        weights, indices = self.gate(x).softmax(-1).sort(dim=-1, descending=True, stable=True)
        return weights[:, : self.k], indices[:, : self.k]


def test_it_is_ten_lines_and_finds_what_there_is():
    code, check = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    scope = {"MyRouter": MyRouter, "MyConfig": lambda **values: SimpleNamespace(**values)}
    exec(code, scope)
    results = run_suite(scope["MyAdapter"](), [row.number for row in ROWS if row.number not in (5, 15)])
    status = {result.row.number: result.status for result in results}
    assert status[11] == status[23] == status[12] == status[22] == "pass"
    assert [number for number, found in status.items() if found == "fail"] == [10]
    assert "run_suite(MyAdapter())" in check


def test_every_row_is_in_the_table():
    assert re.findall(r"^\| (\d+) \| [^|]* \| [^|]*#\d+[^|]* \| [^|]* \|$", PAGE, re.M) == [str(n) for n in range(1, 27)]
