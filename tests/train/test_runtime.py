"""Devices and precision, as far as a machine without a GPU can tell."""

import pytest
import torch

from evenload.models import GPTConfig
from evenload.train import ConfigError
from evenload.train.runtime import check_expert_compute, choose_autocast, choose_device

CPU = torch.device("cpu")


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cuda").index is None
    assert current == [torch.device("cuda:1")]
    with pytest.raises(ConfigError, match="torch sees 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_chosen_where_the_gpu_computes_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert choose_autocast("auto", torch.device("cuda")) == (torch.bfloat16 if native else None)
    assert choose_autocast("auto", CPU) is None


def test_grouped_experts_of_an_illegal_width_are_refused() -> None:
    wide = GPTConfig(d_model=16, num_heads=2, num_kv_heads=1, expert_hidden=20, expert_compute="grouped")
    check_expert_compute(wide, CPU, None)
    with pytest.raises(ConfigError, match=r'model.expert_compute = "grouped": rows must be multiples of 16 bytes'):
        check_expert_compute(wide, CPU, torch.bfloat16)
    wide.expert_compute = "auto"
    check_expert_compute(wide, CPU, torch.bfloat16)
