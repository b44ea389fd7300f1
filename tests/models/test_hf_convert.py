import pytest
import torch
from hf_models import CONFIGS, SHAPE, SIGMOID, batch, build
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig, Qwen3MoeConfig

import evenload
from evenload.models import GPT, GPTConfig
from evenload.models.hf import from_hf, load_hf, save_hf, to_hf
from evenload.train.tokenizer import train_tokenizer

ON_SCORES = [{"name": "eqb", "space": "scores"}, {"name": "lei"}]
KOLIBRI = pytest.mark.skipif("kolibri1" not in CONFIGS, reason="this transformers has no Kolibri-1")
SMALL = {
    "vocab_size": 300,
    "d_model": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 32,
    "num_experts": 8,
    "expert_hidden": 16,
    "init_std": 0.2,
}
EXPORTABLE = {
    "kolibri": {"post_norm": True},
    "kolibri with everything": {
        "post_norm": True,
        "shared_hidden": 24,
        "normalize_weights": True,
        "tie_embeddings": False,
        "head_dim": 10,
    },
    "glm": {"balancers": ON_SCORES},
    "glm with everything": {
        "balancers": "loss_free",
        "num_dense_layers": 1,
        "shared_hidden": 24,  # one and a half experts
        "normalize_weights": True,
        "routed_scale": 2.5,
        "num_groups": 4,
        "group_top_k": 2,
        "tie_embeddings": False,
        "head_dim": 10,
        "rope_theta": 500.0,
        "norm_eps": 1e-3,
    },
    "glm without a bias": {"balancers": "lei", "shared_hidden": 32},
    "glm, sinkhorn in training": {"balancers": "sinkhorn"},
    "qwen": {"score": "softmax", "balancers": "phi"},
    "qwen with everything": {
        "score": "softmax",
        "balancers": "gshard+z_loss",
        "num_dense_layers": 2,
        "normalize_weights": True,
        "tie_embeddings": False,
        "head_dim": 10,
        "rope_theta": 500.0,
        "norm_eps": 1e-3,
    },
}


def trained(options: dict) -> GPT:
    """A model whose biases and norms are not what they were initialised with."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SMALL, **options}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(300, (4, 32))
    for _ in range(3):
        model(tokens, tokens).loss.backward()
        evenload.balance_step(model)
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(iter(["the quick brown fox jumps over the lazy dog " * 20]), 300).to_json())
    return str(path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=KOLIBRI if "kolibri" in name else ()) for name in EXPORTABLE])
def test_stock_transformers_computes_the_same_and_the_way_back_is_exact(name, tmp_path, tokenizer):
    model = trained(EXPORTABLE[name])
    save_hf(tmp_path, model.config, model.state_dict(), tokenizer)
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(stock).__module__.startswith("transformers.models.")

    tokens = torch.randint(300, (4, 32))  # as long as the model allows
    torch.testing.assert_close(stock(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    config, state, path = load_hf(tmp_path)
    assert config == model.config
    assert path == tmp_path / "tokenizer.json"
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        if not key.endswith("phi.mean"):  # of no use outside of training, and so not exported
            assert torch.equal(state[key], value), key
    GPT(config).load_state_dict(state)


def test_the_export_writes_text(tmp_path, tokenizer):
    model = trained({"balancers": ON_SCORES})
    save_hf(tmp_path, model.config, model.state_dict(), tokenizer)
    words = AutoTokenizer.from_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert words.decode(words("the lazy fox").input_ids) == "the lazy fox"
    assert words.eos_token_id == stock.generation_config.eos_token_id == 0

    prompt = words("the quick", return_tensors="pt").input_ids
    written = stock.generate(prompt, max_new_tokens=8, do_sample=False)
    ours = prompt
    for _ in range(written.shape[1] - prompt.shape[1]):
        ours = torch.cat([ours, model(ours).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(written, ours)
    assert words.decode(written[0]).startswith("the quick")


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        (
            {"balancers": "eqb+lei"},
            r"balancers: eqb has its bias on the logits, GLM-4-MoE has one on the scores.*space: scores.*post_norm=true",
        ),
        ({"balancers": "qb"}, "balancers: qb has its bias on the logits"),
        ({"balancers": "loss_free", "post_norm": True}, "balancers: loss_free has its bias on the scores, Kolibri-1 .* logits"),
        ({"post_norm": True, "num_dense_layers": 1}, "num_dense_layers=1: in Kolibri-1 it can only be 0"),
        ({"score": "softmax", "balancers": "lei", "post_norm": True}, "post_norm=True: in Qwen3-MoE it can only be False"),
        ({"balancers": "uniform"}, r"balancers: uniform chooses experts in a way of its own"),
        ({"balancers": "lei", "num_groups": 4, "group_top_k": 2}, r"num_groups=4: without a bias on the scores"),
        ({"balancers": "loss_free", "num_groups": 8, "group_top_k": 4}, r"num_groups=8: .* at least two experts"),
        ({"score": "softmax", "balancers": "eqb"}, r"balancers: eqb has .* Qwen3-MoE has one on no values"),
        ({"score": "softmax", "balancers": "lei", "shared_hidden": 16}, "shared_hidden=16: in Qwen3-MoE it can only be 0"),
        ({"score": "softmax", "balancers": "lei", "routed_scale": 2.0}, r"routed_scale=2\.0: in Qwen3-MoE"),
        ({"score": "identity", "balancers": "lei"}, r"score='identity': stock architectures have sigmoid"),
    ],
)
def test_an_option_that_no_stock_architecture_has_is_named(options, obstacle):
    config = GPTConfig(**{**SMALL, **options})
    with pytest.raises(ValueError, match=obstacle):
        to_hf(config, {})


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_a_stock_model_becomes_a_gpt(family, tmp_path):
    if family == "glm4_moe":
        glm = Glm4MoeConfig(
            **SHAPE, **SIGMOID, use_qk_norm=True, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0}
        )
        torch.manual_seed(0)
        stock = AutoModelForCausalLM.from_config(glm)
        stock.model.layers[1].mlp.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    else:
        stock = build(family)
    stock.eval().save_pretrained(tmp_path)
    config, state, tokenizer = load_hf(tmp_path)
    assert tokenizer is None
    assert config.balancers == ("loss_free" if family == "glm4_moe" else [{"name": "gshard", "coeff": 0.001}])
    model = GPT(config).eval()
    model.load_state_dict(state)
    tokens = batch()["input_ids"]
    torch.testing.assert_close(model(tokens).logits, stock(tokens).logits, rtol=1e-5, atol=1e-5)

    if family == "glm4_moe":
        assert from_hf(stock.config, dict(stock.state_dict()), ON_SCORES)[0].balancers == ON_SCORES
        with pytest.raises(ValueError, match="selection bias on the scores, which these balancers cannot hold"):
            from_hf(stock.config, dict(stock.state_dict()), "eqb+lei")


def test_a_model_that_has_changed_since_its_export_is_described_anew():
    model = trained({"balancers": ON_SCORES})
    theirs, state = to_hf(model.config, model.state_dict())
    theirs.vocab_size = 310
    state["model.embed_tokens.weight"] = torch.zeros(310, 32)
    config, back = from_hf(theirs, state)
    assert (config.vocab_size, config.balancers) == (310, "loss_free")
    GPT(config).load_state_dict(back)


@pytest.mark.parametrize(
    ("theirs", "obstacle"),
    [
        (CONFIGS["mixtral"], r"model_type='mixtral': a GPT can be made of kolibri1, glm4_moe, qwen3_moe"),
        pytest.param(
            CONFIGS.get("kolibri1"), r"layer_types=\['full_attention', 'sliding_attention'\]|sliding_window=5", marks=KOLIBRI
        ),
        (CONFIGS["glm4_moe"], r"partial_rotary_factor=0\.5: a GPT can only express 1\.0"),
        (Glm4MoeConfig(**SHAPE, **SIGMOID, partial_rotary_factor=1.0), "use_qk_norm=False: a GPT can only express True"),
        (Qwen3MoeConfig(**SHAPE, mlp_only_layers=[1]), r"mlp_only_layers=\[1\]: a GPT can only express \[0\]"),
        (Qwen3MoeConfig(**SHAPE, hidden_act="gelu"), "hidden_act='gelu'"),
    ],
)
def test_a_stock_model_that_a_gpt_cannot_express_is_refused(theirs, obstacle):
    with pytest.raises(ValueError, match=obstacle):
        from_hf(theirs, {})


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json there"):
        load_hf(tmp_path)
