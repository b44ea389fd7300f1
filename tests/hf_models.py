"""Small, randomly initialised models of every family that `evenload.models.hf` knows."""

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 64
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # so that routers have opinions
}
ROUTED = {"num_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 32}
SIGMOID = {"n_routed_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 32, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}

OPTIONS: dict[str, dict] = {
    "mixtral": {**SHAPE, "intermediate_size": 16, "num_local_experts": 8},
    "qwen2_moe": {**SHAPE, **ROUTED, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**SHAPE, **ROUTED, "norm_topk_prob": True},
    "olmoe": {**SHAPE, **ROUTED, "intermediate_size": 16},
    "gpt_oss": {**SHAPE, "intermediate_size": 16, "num_local_experts": 8},
    "deepseek_v3": {
        **{**SHAPE, **SIGMOID, **LATENT, "num_key_value_heads": 4, "head_dim": 4},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    },
    "glm4_moe": {**SHAPE, **SIGMOID, "norm_topk_prob": False},
    "kolibri1": {**SHAPE, **ROUTED, "shared_expert_intermediate_size": 16, "sliding_window": 5},
}
#: of the families that the installed transformers has: Kolibri-1 came after 5.17
CONFIGS: dict[str, PreTrainedConfig] = {
    family: AutoConfig.for_model(family, **options) for family, options in OPTIONS.items() if family in CONFIG_MAPPING
}


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A model in training mode; gates with a selection bias of their own get one that is not 0."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).train()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel())[torch.randperm(buffer.numel())])
    return model


def batch(padding: int = 4, length: int = 12, rows: int = 3) -> dict[str, Tensor]:
    """Token ids, mask and labels; the first row ends in `padding` pads."""
    tokens = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(tokens)
    mask[0, length - padding :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
