"""The stock routers of transformers under the conformance suite: what is found there is theirs, not the adapter's."""

import logging

import pytest
import torch

pytest.importorskip("transformers")

from evenload.balancers.conformance import RankPool, run_suite
from evenload.models.stock_routers import ARCHITECTURES, StockAdapter

WITH_LOSS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"]
WITH_BIAS = ["deepseek_v3", "glm4_moe"]


@pytest.fixture(scope="module")
def pool():
    logging.disable(logging.INFO)  # torch.compile's trace log, which pytest would collect
    with RankPool() as pool:
        yield pool
    logging.disable(logging.NOTSET)


def by_status(adapter, rows, pool):
    results = run_suite(adapter, rows, pool)
    return {status: {r.row.number: r.reason for r in results if r.status == status} for status in ("pass", "fail", "n/a")}


def test_every_architecture_is_checked():
    assert sorted(ARCHITECTURES) == sorted(WITH_LOSS + WITH_BIAS)


@pytest.mark.parametrize("architecture", WITH_LOSS)
def test_routers_with_an_auxiliary_loss(pool, architecture):
    found = by_status(StockAdapter(architecture), [1, 3, 6, 12, 13, 18, 21, 23], pool)
    assert set(found["pass"]) == {1, 3, 13, 23}
    assert found["fail"] == {
        6: "4 equal microbatches give 4 times the gate's gradient that one of them gives",
        12: "aux_loss is nan without tokens, and it is added to the training loss",
        18: "two layers that collapse onto different experts show aux_loss 2; each alone 4",
        21: "aux_loss is 2 at perfect balance with K=2; the Switch Transformer paper that its docstring cites says 1",
    }


@pytest.mark.parametrize("architecture", WITH_BIAS)
def test_routers_with_a_bias_that_nobody_updates(pool, architecture):
    found = by_status(StockAdapter(architecture), [1, 3, 7, 8, 9, 17, 20, 24], pool)
    assert set(found["pass"]) == {3, 8, 9, 17, 24}
    assert set(found["n/a"]) == {1}
    assert found["fail"][7] == "gate.e_score_correction_bias becomes bfloat16 after model.to(bfloat16)"
    assert "nothing updates it" in found["fail"][20]


def test_the_router_is_the_stock_one():
    adapter = StockAdapter("mixtral")
    stock = adapter.build(8, 2)
    assert type(stock.router).__module__ == "transformers.models.mixtral.modeling_mixtral"
    x = torch.randn(6, 8)
    logits, weights, indices = stock.router(x)
    decision = adapter.route(stock, x)
    assert torch.equal(decision.logits, logits)
    assert torch.equal(decision.weights, weights)
    assert torch.equal(decision.indices, indices)


def test_the_strength_of_copies_is_what_trainer_trains_with(tmp_path):
    """The claim behind row 6: Trainer divides nothing that the model has been told the number of tokens of."""
    from transformers import Trainer, TrainingArguments

    gradients = []
    for copies in (1, 4):
        torch.manual_seed(0)
        stock = StockAdapter("mixtral").build(8, 2)
        stock.model.config.output_router_logits = True
        stock.model.router_aux_loss_coef = 1000.0  # the balance loss is all there is
        seen = []
        stock.router.weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        ids = list(range(12))
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=copies,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        data = [{"input_ids": ids, "labels": ids} for _ in range(copies)]
        Trainer(model=stock.model, args=arguments, train_dataset=data).train()
        gradients.append(torch.stack(seen).sum(dim=0))
    torch.testing.assert_close(gradients[1], 4 * gradients[0], rtol=1e-2, atol=1e-3)


def test_unknown_architectures_are_refused():
    with pytest.raises(ValueError, match=r"transformers:bert is not known here; known: mixtral, qwen2_moe"):
        StockAdapter("bert")
