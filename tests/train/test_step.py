"""One step: however it is cut into microbatches, and whatever a bad microbatch throws at it."""

import copy

import pytest
import torch

from evenload.models import GPT, GPTConfig
from evenload.train import Batch, make_optimizer, train_step
from evenload.train.config import OptimConfig
from evenload.train.step import accumulate, tolerate_nan

ROWS, SEQ, VOCAB = 6, 16, 50


def model_with(balancers: object) -> GPT:
    torch.manual_seed(1)
    return GPT(
        GPTConfig(
            vocab_size=VOCAB,
            d_model=16,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            num_experts=4,
            expert_hidden=16,
            balancers=balancers,
        )
    )


def rows(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    targets[0, 3:] = -100  # microbatches with very different numbers of targets
    targets[1, :] = -100
    ids = (torch.arange(SEQ) >= 7).long().expand(ROWS, SEQ)
    return Batch(tokens, targets, ids, (0,) * ROWS)


def cut(batch: Batch, pieces: list[int]) -> list[Batch]:
    parts = zip(*(part.split(pieces) for part in (batch.tokens, batch.targets, batch.document_ids)), strict=True)
    return [Batch(*part, (0,) * len(part[0])) for part in parts]


@pytest.mark.parametrize("pieces", [[3, 3], [1, 5], [2, 2, 2], [1] * ROWS])
@pytest.mark.parametrize("balancers", ["none", "eqb", "loss_free"])
def test_accumulation_equals_one_batch(balancers: str, pieces: list[int]) -> None:
    whole, parts = model_with(balancers), model_with(balancers)
    loss, _ = accumulate(whole, [rows()], rows().num_targets)
    loss_of_parts, _ = accumulate(parts, cut(rows(), pieces), rows().num_targets)
    torch.testing.assert_close(loss_of_parts, loss)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=lambda text, name=name: f"{name}: {text}", rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("balancers", ["eqb", "loss_free"])
def test_the_balancers_see_the_step_and_not_its_cut(balancers: str) -> None:
    whole, parts = model_with(balancers), model_with(balancers)
    results = [
        train_step(model, make_optimizer(model, OptimConfig()), batches)
        for model, batches in ((whole, [rows()]), (parts, cut(rows(), [1, 2, 3])))
    ]
    for one, other in zip(results[0].report.counts, results[1].report.counts, strict=True):
        assert torch.equal(one, other)
    biases = [{k: v for k, v in model.state_dict().items() if "balancers" in k} for model in (whole, parts)]
    assert biases[0]
    assert all(torch.equal(biases[0][key], biases[1][key]) for key in biases[0])
    assert any(bias.abs().sum() > 0 for bias in biases[0].values())
    assert results[0].targets == results[1].targets == int((rows().targets != -100).sum())


@pytest.mark.parametrize("poison", ["loss", "gradient", "router"])
def test_a_bad_step_changes_nothing(poison: str) -> None:
    """After a good step, a bad one leaves parameters, optimizer and balancers alone, and the next good step is the one that
    would have come without it, to the bit."""

    def run(with_bad_step: bool) -> GPT:
        model = model_with("eqb+lei+phi")
        tolerate_nan(model)
        optimizer = make_optimizer(model, OptimConfig())
        assert train_step(model, optimizer, [rows(0)], clip=1.0).good
        if with_bad_step:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            hook = _poison(model, poison)
            result = train_step(model, optimizer, [rows(1), rows(2)], clip=1.0)
            hook.remove()
            assert not result.good
            assert_same((model.state_dict(), optimizer.state_dict()), before)
        assert train_step(model, optimizer, [rows(3)], clip=1.0).good
        return model

    assert_same(run(True).state_dict(), run(False).state_dict())


def _poison(model: GPT, where: str) -> torch.utils.hooks.RemovableHandle:
    if where == "gradient":
        return model.final_norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    part = {"loss": model.blocks[0].attention, "router": model.blocks[1].ffn_norm}[where]
    calls = iter([True, False])  # the first of two microbatches
    return part.register_forward_hook(lambda *args: args[-1] * torch.nan if next(calls) else args[-1])


def assert_same(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def test_a_step_without_targets_is_harmless() -> None:
    model = model_with("eqb+lei")
    batch = rows()
    batch.targets.fill_(-100)
    result = train_step(model, make_optimizer(model, OptimConfig()), [batch], clip=1.0)
    assert result.good
    assert (result.loss, result.targets) == (0.0, 0)


def test_autocast_trains() -> None:
    model = model_with("eqb+lei")
    result = train_step(model, make_optimizer(model, OptimConfig()), [rows()], autocast=torch.bfloat16)
    assert result.good
    assert next(model.parameters()).dtype == torch.float32
