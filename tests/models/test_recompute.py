"""Activation checkpointing and compilation of a GPT change memory and speed, and nothing else."""

from dataclasses import replace

import pytest
import torch
from state import carried
from torch.utils.flop_counter import FlopCounterMode

from evenload.balancers import balance_step, routers
from evenload.models import ACTIVATION_CHECKPOINTING, GPT, GPTConfig

SHAPE = GPTConfig(
    vocab_size=64, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=8, top_k=2, expert_hidden=16,
    shared_hidden=16, balancers="eqb+lei",
)  # fmt: skip


def build(mode: str, compiled: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    model.set_activation_checkpointing(mode)
    if compiled:
        model.compile_blocks(backend="aot_eager")
    return model


def one_step(model: GPT) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, tokens.roll(-1, 1)).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_bit(mode: str) -> None:
    plain, again = build("none"), build(mode)
    loss, gradients = one_step(plain)
    loss_again, gradients_again = one_step(again)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    balance_step(plain), balance_step(again)
    for name, value in carried(plain).items():
        assert torch.equal(value, carried(again)[name]), name


def test_recomputation_sees_the_same_decisions() -> None:
    model = build("full")
    decisions: list[torch.Tensor] = []
    router = next(iter(routers(model).values()))
    router.register_forward_hook(lambda _, __, routing: decisions.append(routing.indices))
    one_step(model)
    first, second = decisions  # of the forward, and of the backward
    assert torch.equal(first, second)


def saved_bytes(mode: str) -> int:
    model, kept = build(mode), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    return sum(kept.values())


def test_a_recomputed_block_keeps_less() -> None:
    assert saved_bytes("full") < saved_bytes("none") / 2


def test_selective_computes_no_matrix_product_twice() -> None:
    flops = {}
    for mode in ACTIVATION_CHECKPOINTING:
        model = GPT(replace(SHAPE, expert_compute="loop"))
        model.set_activation_checkpointing(mode)
        with FlopCounterMode(display=False) as counter:
            one_step(model)
        flops[mode] = counter.get_total_flops()
    assert flops["none"] == flops["selective"] < flops["full"]


def test_compiled_blocks_compute_the_same() -> None:
    loss, gradients = one_step(build("none"))
    for mode in ("none", "full"):
        torch._dynamo.reset()
        loss_compiled, gradients_compiled = one_step(build(mode, compiled=True))
        torch.testing.assert_close(loss_compiled, loss)
        torch.testing.assert_close(gradients_compiled, gradients, rtol=1e-4, atol=1e-7)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode='some'; choose one of"):
        build("some")


def test_selective_and_compiled_are_refused_together() -> None:
    with pytest.raises(ValueError, match="compiled blocks hide"):
        build("selective", compiled=True)
    model = build("none", compiled=True)
    with pytest.raises(ValueError, match="compiled blocks hide"):
        model.set_activation_checkpointing("selective")
