import copy

import pytest
import torch
from hf_models import CONFIGS, batch, build
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import evenload
from evenload.models.hf import BalanceCallback, balance, load_balancers, save_balancers, unbalance

WITH_BIAS = ["deepseek_v3", "glm4_moe", "kolibri1"]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gate_weights(model) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith(("mlp.gate.weight", "mlp.router.weight"))]


def biases(model) -> list[torch.Tensor]:
    return [router.balancers["eqb"].bias.clone() for router in evenload.routers(model).values()]


def assert_same(a, b, **tolerance):
    torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("family", CONFIGS)
def test_none_is_the_stock_model_to_the_bit_and_reports_its_balance(family):
    stock, model = build(family), balance(build(family), "none")
    assert list(model.state_dict()) == list(stock.state_dict())
    outputs = [m(**batch()) for m in (stock, model)]
    for output in outputs:
        output.loss.backward()
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert_same(gradients(model), gradients(stock))
    report = evenload.balance_step(model)
    assert [int(counts.sum()) for counts in report.counts] == [2 * 32] * len(report.counts)  # 36 tokens, 4 of them padding


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_and_choices_follow_the_models_own_convention(family):
    """Before the first step, biases are 0 or the model's own: real tokens get what the stock model gives them."""
    stock, model = build(family), balance(build(family), "eqb+lei")
    real = batch()["attention_mask"].bool()
    assert_same(model(**batch()).logits[real], stock(**batch()).logits[real], rtol=1e-5, atol=1e-6)
    assert_same(model.eval()(**batch()).logits, stock.eval()(**batch()).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_are_kept_and_unbalance_takes_ours_out(family):
    stock, model = build(family), balance(build(family), "eqb+lei")
    added = set(model.state_dict()) - set(stock.state_dict())
    assert added
    assert all(key.endswith("evenload.balancers.eqb.bias") for key in added)
    assert not set(stock.state_dict()) - set(model.state_dict())
    unbalance(model)
    assert_same(dict(model.state_dict()), dict(stock.state_dict()))
    assert torch.equal(model(**batch()).logits, stock(**batch()).logits)
    assert "save_pretrained" not in vars(model)


@pytest.mark.parametrize("family", CONFIGS)
def test_eqb_evens_the_load(family):
    model = balance(build(family), "eqb")
    many = batch(padding=0, length=64, rows=8)
    first, *_, last = (float(step(model, many).layers["maxvio"].max()) for _ in range(5))
    assert last < 0.5 * first


def step(model, inputs) -> evenload.BalanceReport:
    with torch.no_grad():
        model(**inputs)
    return evenload.balance_step(model)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_padding_counts_nowhere(family, side):
    """A batch with pads gives the counts, biases and gradients of the batch without them."""
    plain = batch(padding=0)
    plain["position_ids"] = torch.arange(12).expand(3, 12)
    plain["labels"][:, 0] = -100  # or the last pad on the left would have to predict it
    filler = {"input_ids": 5, "attention_mask": 0, "labels": -100, "position_ids": 1}
    widths = {"left": (6, 0), "right": (0, 6)}[side]
    padded = {name: torch.nn.functional.pad(value, widths, value=filler[name]) for name, value in plain.items()}
    found = []
    for inputs in (plain, padded):
        model = balance(build(family), "eqb+lei")
        model(**inputs).loss.backward()
        report = evenload.balance_step(model)
        found.append((report.counts, biases(model), [p.grad for p in gate_weights(model)]))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1:], found[1][1:], rtol=1e-4, atol=1e-6)


def test_documents_are_known_from_positions():
    """Two documents in one row weigh like two rows in the per-document loss."""
    inputs = batch(padding=0, length=6, rows=2)
    packed = {"input_ids": inputs["input_ids"].reshape(1, 12), "position_ids": torch.arange(6).repeat(2)[None]}
    losses = []
    for given in ({"input_ids": inputs["input_ids"]}, packed):
        model = balance(build("mixtral"), [{"name": "gshard", "scope": "sequence"}])
        losses.append(step(model, {**given, "use_cache": False}).losses["gshard"])
    assert_same(losses[0], losses[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_the_stock_loss_is_off_while_ours_is_on(family):
    model = build(family)
    coefficient = model.router_aux_loss_coef
    main = float(model(**batch()).loss.detach())
    balance(model, "none")
    assert float(model(**batch(), output_router_logits=True).loss) > main
    unbalance(model)
    balance(model, "lei")
    output = model(**batch(), output_router_logits=True)
    assert_same(output.loss, torch.tensor(main), rtol=1e-5, atol=1e-6)
    assert len(output.router_logits) == 2
    unbalance(model)
    assert model.router_aux_loss_coef == coefficient


def accumulated(model, weights, **kwargs) -> list[torch.Tensor]:
    """The gates' gradients of two microbatches of different length."""
    for padding, weight in zip((2, 6), weights, strict=True):
        (model(**batch(padding), **kwargs).loss * weight).backward()
    return [p.grad for p in gate_weights(model)]


def test_injected_gradients_follow_the_scale_of_the_loss():
    """Divided by hand or by `num_items_in_batch`, and multiplied for float16: one strength."""
    targets = [int((batch(padding)["labels"][:, 1:] != -100).sum()) for padding in (2, 6)]
    total = sum(targets)
    build_one = lambda: balance(build("mixtral"), [{"name": "lei", "coeff": 3.0}])  # noqa: E731
    by_hand = accumulated(build_one(), [count / total for count in targets])
    by_items = accumulated(build_one(), [1.0, 1.0], num_items_in_batch=torch.tensor(total))
    scaled = accumulated(build_one(), [1024.0, 1024.0], num_items_in_batch=torch.tensor(total))
    without = accumulated(balance(build("mixtral"), "none"), [count / total for count in targets])
    assert_same(by_items, by_hand, rtol=1e-4, atol=1e-6)
    assert_same([grad / 1024 for grad in scaled], by_hand, rtol=1e-4, atol=1e-6)
    assert (by_hand[0] - without[0]).abs().max() > 1e-3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    """Also where two forwards come before their backwards: each is computed again with its own mask."""
    found = []
    for checkpointing in (False, True):
        model = balance(build(family), "eqb+lei")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        losses = [model(**batch(padding)).loss for padding in (2, 6)]
        for loss in losses:
            loss.backward()
        report = evenload.balance_step(model)
        found.append((report.counts, biases(model), gradients(model)))
    assert_same(found[0][:2], found[1][:2])
    assert_same(found[0][2], found[1][2], rtol=1e-5, atol=1e-7)


def test_in_eval_nothing_is_observed_and_text_is_generated():
    model = balance(build("mixtral"), "eqb+lei")
    before = copy.deepcopy(model.state_dict())
    tokens = model.eval().generate(batch(padding=0)["input_ids"][:1], max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] <= 16
    assert_same(dict(model.state_dict()), dict(before))
    assert all(int(router.counts.sum()) == 0 for router in evenload.routers(model).values())


def test_a_copy_is_a_model_of_its_own():
    model = balance(build("mixtral"), "eqb+lei")
    twin = copy.deepcopy(model)
    step(model, batch())
    assert not torch.equal(biases(model)[0], biases(twin)[0])
    step(twin, batch())
    assert_same(biases(model), biases(twin))
    unbalance(twin)
    assert not evenload.routers(twin)
    assert evenload.routers(model)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_saved_model_loads_in_stock_transformers(family, tmp_path):
    model = balance(build(family), "eqb+lei")
    step(model, batch())
    model.eval().save_pretrained(tmp_path)
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    logits = stock(**batch()).logits
    if family in WITH_BIAS:  # the learned bias is in the gate's own
        assert_same(logits, model(**batch()).logits, rtol=1e-5, atol=1e-6)
    else:
        assert (logits - model(**batch()).logits).abs().max() > 1e-4
    again = balance(stock, "eqb+lei")
    load_balancers(again, tmp_path)
    assert_same(biases(again), biases(model))
    assert torch.equal(again.eval()(**batch()).logits, model(**batch()).logits)


def test_a_file_of_other_balancers_is_refused(tmp_path):
    model = balance(build("mixtral"), "eqb")
    save_balancers(model, tmp_path)
    for spec in ("loss_free", "lei"):
        unbalance(model)
        balance(model, spec)
        with pytest.raises(ValueError, match=r"evenload\.safetensors does not fit .*layers\.0"):
            load_balancers(model, tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        load_balancers(model, tmp_path / "elsewhere")


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 64, (16,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(16) < 16 - index % 5).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def trained(folder, steps: int, resume: bool = False, **options):
    callback = BalanceCallback()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=steps,
        train_sampling_strategy="sequential",  # the stock Trainer does not find its place in a shuffled order
        save_steps=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    model = balance(build("mixtral"), "eqb+lei")
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback


def test_the_trainer_balances_once_a_step_and_resumes_where_it_was(tmp_path):
    trainer, callback = trained(tmp_path / "whole", 4)
    tokens = int(callback.report.layers["tokens"][0])
    assert 2 * 2 * 12 <= tokens <= 2 * 2 * 16  # the whole step's, without padding, in spite of recomputation
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 4
    assert all({"maxvio", "maxvio_local", "lei_loss"} <= set(entry) for entry in logged)

    trained(tmp_path / "parts", 2)
    resumed, _ = trained(tmp_path / "parts", 4, resume=True)
    assert_same(dict(resumed.model.state_dict()), dict(trainer.model.state_dict()))


def test_the_best_checkpoint_comes_back_with_its_balancers(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer, _ = trained(tmp_path, 4, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=64, **best)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")  # the loss falls
    model = balance(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2"), "eqb+lei")
    load_balancers(model, tmp_path / "checkpoint-2")
    assert_same(dict(trainer.model.state_dict()), dict(model.state_dict()))


def test_resuming_without_the_balancers_state_warns(tmp_path):
    trained(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "evenload.safetensors").unlink()
    with pytest.warns(UserWarning, match="the balancers go on without their state"):
        trained(tmp_path, 3, resume=True)


def test_what_cannot_be_balanced_is_refused():
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(
        ValueError, match=r"no mixture-of-experts gate .* LlamaForCausalLM; known are those of Mixtral, .*gpt-oss"
    ):
        balance(dense)
    with pytest.raises(ValueError, match="is not balanced"):
        unbalance(dense)
    model = balance(build("mixtral"))
    with pytest.raises(ValueError, match="balanced already; call unbalance"):
        balance(model)
    with pytest.raises(ValueError, match=r"attention_mask is \(1, 1, 12, 12\).*position_ids"):
        model(input_ids=batch()["input_ids"][:1], attention_mask=torch.ones(1, 1, 12, 12))
    with pytest.raises(ValueError, match="unknown balancer 'eqp'"):
        balance(build("mixtral"), "eqp")


@pytest.mark.parametrize("spec", ["sinkhorn", "uniform"])
def test_a_bias_that_the_gate_cannot_hold_is_refused_and_nothing_has_changed(spec):
    model = build("glm4_moe")
    with pytest.raises(ValueError, match=f"{spec} cannot take the place of Glm4MoeTopkRouter's own selection bias"):
        balance(model, spec)
    assert not evenload.routers(model)
    balance(model, "loss_free")
