import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from evenload.models import GPT, GPTConfig
from evenload.train import Trainer, load_config
from evenload.train.cli import main
from evenload.train.errors import ConfigError
from evenload.train.export import load_exported
from evenload.train.hugging_face import write_hf
from evenload.train.tokenizer import train_tokenizer

SHAPE = {"vocab_size": 300, "d_model": 32, "num_layers": 2, "max_seq_len": 32, "num_experts": 8, "expert_hidden": 16}
ON_SCORES = [{"name": "eqb", "space": "scores"}, {"name": "lei"}]


@pytest.fixture
def exported(tmp_path) -> tuple[Path, GPT]:
    """A folder in transformers' format, and the model in it."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_tokenizer(iter(["some words to learn from"]), 300).to_json())
    model = GPT(GPTConfig(**SHAPE, balancers=ON_SCORES))
    write_hf(tmp_path / "hf", SHAPE | {"balancers": ON_SCORES}, model.state_dict(), tokenizer)
    return tmp_path / "hf", model


@pytest.mark.parametrize(
    ("override", "architecture"),
    [("model.post_norm=true", "Kolibri1"), ("model.balancers=[{name: eqb, space: scores}, {name: lei}]", "Glm4Moe")],
)
def test_a_run_goes_to_transformers_and_comes_back(mini, tmp_path, capsys, override, architecture):
    trainer = Trainer(load_config(mini, [f"run.out={tmp_path}/run", "run.steps=2", override]), say=lambda _: None)
    trainer.run()
    assert main(["export", str(tmp_path / "run"), "hf"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == tmp_path / "run" / "export" / "hf-step-00000002"

    stock, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(stock).__name__ == f"{architecture}ForCausalLM"
    tokens = words("import sys, os", return_tensors="pt").input_ids
    torch.testing.assert_close(stock(tokens).logits, trainer.model.eval()(tokens).logits, rtol=1e-5, atol=1e-5)
    assert stock.generate(tokens, max_new_tokens=4, min_new_tokens=4).shape[1] == tokens.shape[1] + 4

    assert main(["import", str(folder), f"out={tmp_path}/ours"]) == 0
    state = load_exported(tmp_path / "ours").state_dict()
    assert state.keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in trainer.model.state_dict().items())


def test_a_run_that_no_stock_architecture_can_express_says_why(mini, tmp_path, capsys):
    Trainer(load_config(mini, [f"run.out={tmp_path}/run", "run.steps=1"]), say=lambda _: None).run()
    assert main(["export", str(tmp_path / "run"), "hf"]) == 2
    assert "eqb has its bias on the logits" in capsys.readouterr().err


def test_what_was_exported_is_imported_to_the_bit(exported, tmp_path, capsys):
    folder, model = exported
    assert main(["import", str(folder), f"out={tmp_path / 'ours'}"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "ours")
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as weights:
        config = GPTConfig(**json.loads(weights.metadata()["config"])["model"])
        state = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118  (not a dict)
    assert config == model.config
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert (tmp_path / "ours" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "to=x"], "'to': write out=PATH"),
        (["{folder}", "balancers=lei"], "give the new folder as out=PATH"),
        (["{folder}", "out={folder}"], "exists; remove it or choose another out=PATH"),
        (["{folder}/nothing", "out={folder}/x"], "no config.json there"),
        (["{folder}", "out={folder}/x", "balancers=[lei"], "not valid YAML"),
        (["{folder}", "out={folder}/x", "balancers=eqp"], "unknown balancer 'eqp'"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(exported, capsys, arguments, message):
    folder, _ = exported
    assert main(["import", *(argument.format(folder=folder) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evenload: error: import: ")
    assert message in error
    assert not (folder / "x").exists()


def test_the_option_in_the_way_of_an_export_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"export: no stock architecture.*eqb has its bias on the logits"):
        write_hf(tmp_path, SHAPE | {"balancers": "eqb+lei"}, {}, tmp_path / "tokenizer.json")
