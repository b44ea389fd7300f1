import dataclasses

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from evenload.models import GPT, GPTConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size=0"),
        ("num_kv_heads", 3, "num_kv_heads=3"),
        ("num_heads", 6, "num_heads=6"),
        ("head_dim", 5, "head_dim=5"),
        ("head_dim", 0, "head_dim=0"),
        ("num_dense_layers", 5, "num_dense_layers=5"),
        ("top_k", 17, "top_k=17"),
        ("capacity_factor", 0.0, "capacity_factor=0.0"),
        ("expert_compute", "fast", "expert_compute='fast'"),
        ("z_loss", float("nan"), "z_loss=nan"),
        ("init_std", 0.0, "init_std=0.0"),
        ("shared_hidden", -1, "shared_hidden=-1"),
    ],
)
def test_refuses_what_is_no_model(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{field: value})


def test_a_config_changed_after_construction_is_checked_when_the_model_is_built() -> None:
    config = GPTConfig()
    config.top_k = 99
    with pytest.raises(ValueError, match="top_k=99"):
        GPT(config)


def test_is_a_structured_config() -> None:
    schema = OmegaConf.structured(GPTConfig)
    changes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 16, "balancers": [{"name": "lei", "coeff": 0.03}]}
    config = OmegaConf.to_object(OmegaConf.merge(schema, changes))
    assert isinstance(config, GPTConfig)
    assert config.head_width == 16
    assert config.balancers == [{"name": "lei", "coeff": 0.03}]
    with pytest.raises(ConfigKeyError, match="num_head"):
        OmegaConf.merge(schema, {"num_head": 8})
    with pytest.raises(ValidationError, match="many"):
        OmegaConf.merge(schema, {"num_experts": "many"})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "num_dense_layers": 1, "shared_hidden": 24},
        {"post_norm": True},
        {"head_dim": 8, "num_heads": 6, "num_kv_heads": 3, "num_dense_layers": 2, "dense_hidden": 40},
    ],
)
def test_parameter_count_is_that_of_the_model(changes: dict[str, object]) -> None:
    config = dataclasses.replace(GPTConfig(vocab_size=50, d_model=32, num_layers=3, num_experts=4, expert_hidden=16), **changes)
    with torch.device("meta"):
        model = GPT(config)
    assert config.num_parameters().total == sum(p.numel() for p in model.parameters())
    idle_experts = (config.num_experts - config.top_k) * 3 * config.d_model * config.expert_hidden
    moe_layers = config.num_layers - config.num_dense_layers
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    assert config.num_parameters().total - config.num_parameters().active == moe_layers * idle_experts + looked_up
