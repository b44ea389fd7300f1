"""GPT-MoE to and from the stock architectures of transformers: pure functions on configurations and state dicts.

Three of them are made of the same parts as ours: normed residual blocks, grouped queries with QK-norm per head, rotary
positions over the whole head, SwiGLU experts without biases.

    kolibri1    sigmoid scores, a selection bias on the logits, shared experts; its blocks have post-norms
    glm4_moe    sigmoid scores, a selection bias on the scores, groups, shared and leading dense layers, scaled weights
    qwen3_moe   softmax scores, leading dense layers

Every tensor of ours is a tensor of theirs, or several of theirs on top of each other, so both ways are exact to the bit.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ...balancers import Balancer, Router, make_balancers
from ..config import GPTConfig
from .gates import CORRECTION

ARCHITECTURES = {"kolibri1": "Kolibri-1", "glm4_moe": "GLM-4-MoE", "qwen3_moe": "Qwen3-MoE"}
BIAS_SPACE = {"kolibri1": "logits", "glm4_moe": "scores"}  # what a selection bias is added to
OURS = "evenload"  # the key of their configuration under which ours travels: what they have no word for, such as balancers
BIASES = ("eqb", "qb", "qb_histogram", "loss_free")  # balancers whose bias is one learned number per expert


class Part(NamedTuple):
    """A tensor of ours, and those of theirs that it consists of, first to last along its rows."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]


def to_hf(config: GPTConfig, state: dict[str, Tensor]) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """The stock configuration and state dict that compute what `GPT(config)` with `state` computes in eval mode.

    What only training needs (the average of phi) is not in it.

    Raises:
        ValueError: naming the option that no stock architecture can express.
    """
    theirs = stock_config(config)
    shared = shared_width(theirs)
    converted: dict[str, Tensor] = {}
    for part in parts(config):
        pieces = [state[part.ours]] if len(part.theirs) == 1 else state[part.ours].split(part.rows)
        for name, piece in zip(part.theirs, pieces, strict=True):
            converted[name] = _resized(piece, name, shared)
    for layer in range(config.num_dense_layers, config.num_layers):
        if theirs.model_type in BIAS_SPACE:
            converted[f"model.layers.{layer}.mlp.gate.{CORRECTION}"] = _selection_bias(config, state, layer)
            if not config.shared_hidden:
                for name, shape in (("gate", (0, config.d_model)), ("up", (0, config.d_model)), ("down", (config.d_model, 0))):
                    converted[f"model.layers.{layer}.mlp.shared_experts.{name}_proj.weight"] = state["embedding"].new_zeros(
                        shape
                    )
    if config.tie_embeddings:
        converted["lm_head.weight"] = converted["model.embed_tokens.weight"]
    return theirs, converted


def from_hf(theirs: PreTrainedConfig, state: dict[str, Tensor], balancers: Any = None) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The GPTConfig and state dict that compute what a stock model computes.

    Args:
        theirs, state: of one of `ARCHITECTURES`.
        balancers: as in GPTConfig. None = those it was exported with, or else what the architecture is known to be trained
            with: "eqb+lei" for Kolibri-1, "loss_free" for GLM-4-MoE, "gshard" with its own coefficient for Qwen3-MoE.

    Raises:
        ValueError: naming what a GPT cannot express.
    """
    config = gpt_config(theirs, balancers)
    shared = config.shared_hidden
    converted: dict[str, Tensor] = {}
    for part in parts(config):
        pieces = [_resized(state[name], name, shared) for name in part.theirs]
        converted[part.ours] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    fresh = Router(None, config.num_experts, config.top_k, **_router_options(config)).state_dict()
    biasing = _biasing(config)
    for layer in range(config.num_dense_layers, config.num_layers):
        converted |= {f"blocks.{layer}.ffn.router.{key}": value.clone() for key, value in fresh.items()}
        correction = state.get(f"model.layers.{layer}.mlp.gate.{CORRECTION}")
        if correction is None:
            continue
        space = BIAS_SPACE[theirs.model_type]
        if biasing is not None and biasing.name in BIASES and biasing.space == space:
            converted[_bias_key(layer, biasing)] = correction.float()
        elif correction.any():
            raise ValueError(
                f"the model has a selection bias on the {space}, which these balancers cannot hold; give "
                f'balancers=[{{"name": "eqb", "space": "{space}"}}, "lei"]'
            )
    return config, converted


def stock_config(config: GPTConfig) -> PreTrainedConfig:
    """The stock configuration that describes the same model. Raises ValueError naming the option that is in the way."""
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.dense_width,
        "moe_intermediate_size": config.expert_hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.normalize_weights,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        OURS: dataclasses.asdict(config),
    }
    if config.score == "sigmoid" and config.post_norm:
        _refuse(_obstacles(config, "kolibri1", num_dense_layers=0, routed_scale=1.0, num_groups=None))
        return _new(
            "kolibri1",
            **common,
            num_experts=config.num_experts,
            shared_expert_intermediate_size=config.shared_hidden,
            # Its layers with full attention have no positions; a window over the whole length leaves nothing out.
            sliding_window=config.max_seq_len,
            layer_types=["sliding_attention"] * config.num_layers,
        )
    if config.score == "sigmoid":
        _refuse(_obstacles(config, "glm4_moe"))
        return _new(
            "glm4_moe",
            **common,
            n_routed_experts=config.num_experts,
            n_shared_experts=-(-config.shared_hidden // config.expert_hidden),  # rounded up, and filled with zeros
            n_group=config.num_groups or 1,
            topk_group=config.group_top_k or 1,
            routed_scaling_factor=config.routed_scale,
            first_k_dense_replace=config.num_dense_layers,
            use_qk_norm=True,
            num_mtp_layers=0,
        )
    if config.score == "softmax":
        _refuse(_obstacles(config, "qwen3_moe", post_norm=False, shared_hidden=0, routed_scale=1.0, num_groups=None))
        return _new("qwen3_moe", **common, num_experts=config.num_experts, mlp_only_layers=list(range(config.num_dense_layers)))
    raise ValueError(
        f"score={config.score!r}: stock architectures have sigmoid (Kolibri-1, GLM-4-MoE) or softmax (Qwen3-MoE) scores"
    )


def _new(architecture: str, **options: Any) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(architecture, **options)
    except ValueError as error:
        if architecture in transformers.CONFIG_MAPPING:
            raise
        raise ValueError(f"transformers {transformers.__version__} has no {architecture}; install 5.24 or newer") from error


def gpt_config(theirs: PreTrainedConfig, balancers: Any = None) -> GPTConfig:
    """The GPTConfig of a stock configuration; the very one it was exported from, where it still describes the model."""
    if theirs.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={theirs.model_type!r}: a GPT can be made of {', '.join(ARCHITECTURES)}, which have its attention and "
            "experts"
        )
    config = _described(theirs)
    kept = getattr(theirs, OURS, None)
    if kept is not None and _same_model(stock_config(GPTConfig(**kept)), theirs):
        config = GPTConfig(**kept)
    return config if balancers is None else dataclasses.replace(config, balancers=balancers)


def parts(config: GPTConfig) -> Iterator[Part]:
    """Every tensor that both sides have."""
    yield Part("embedding", ("model.embed_tokens.weight",), (0,))
    heads = tuple(count * config.head_width for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads))
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        single = {
            "attention_norm.weight": "input_layernorm.weight",
            "attention.q_norm.weight": "self_attn.q_norm.weight",
            "attention.k_norm.weight": "self_attn.k_norm.weight",
            "attention.out.weight": "self_attn.o_proj.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
        }
        if config.post_norm:
            single["post_attention_norm.weight"] = "post_self_attn_layernorm.weight"
            single["post_ffn_norm.weight"] = "post_mlp_layernorm.weight"
        swiglus = {}
        if layer < config.num_dense_layers:
            swiglus["ffn"] = ("mlp", config.dense_width)
        else:
            single["ffn.router.weight"] = "mlp.gate.weight"
            single["ffn.experts.w_gate_up"] = "mlp.experts.gate_up_proj"
            single["ffn.experts.w_down"] = "mlp.experts.down_proj"
            if config.shared_hidden:
                swiglus["ffn.shared"] = ("mlp.shared_experts", config.shared_hidden)
        qkv = tuple(f"{theirs}self_attn.{name}_proj.weight" for name in "qkv")
        yield Part(f"{ours}attention.qkv.weight", qkv, heads)
        for mine, (other, width) in swiglus.items():
            gate_up = (f"{theirs}{other}.gate_proj.weight", f"{theirs}{other}.up_proj.weight")
            yield Part(f"{ours}{mine}.gate_up.weight", gate_up, (width, width))
            single[f"{mine}.down.weight"] = f"{other}.down_proj.weight"
        for mine, other in single.items():
            yield Part(ours + mine, (theirs + other,), (0,))
    yield Part("final_norm.weight", ("model.norm.weight",), (0,))
    if not config.tie_embeddings:
        yield Part("head.weight", ("lm_head.weight",), (0,))


def shared_width(theirs: Any) -> int:
    """Hidden width of their shared expert; GLM-4-MoE's is a multiple of the routed experts'."""
    if theirs.model_type == "kolibri1":
        return theirs.shared_expert_intermediate_size
    return theirs.n_shared_experts * theirs.moe_intermediate_size if theirs.model_type == "glm4_moe" else 0


def _resized(tensor: Tensor, name: str, width: int) -> Tensor:
    """A shared expert's matrix with `width` hidden units: units whose weights are all 0 change nothing, and come and go."""
    if ".shared_experts." not in name:
        return tensor
    dim = 1 if ".down_proj." in name else 0
    missing = width - tensor.shape[dim]
    if missing <= 0:
        return tensor.narrow(dim, 0, width).contiguous()
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _router_options(config: GPTConfig) -> dict[str, Any]:
    return {
        "balancers": config.balancers,
        "score": config.score,
        "num_groups": config.num_groups,
        "group_top_k": config.group_top_k,
    }


def _biasing(config: GPTConfig) -> Balancer | None:
    return next((balancer for balancer in make_balancers(config.balancers) if balancer.sets_bias), None)


def _bias_key(layer: int, biasing: Balancer) -> str:
    return f"blocks.{layer}.ffn.router.balancers.{biasing.name}.bias"


def _selection_bias(config: GPTConfig, state: dict[str, Tensor], layer: int) -> Tensor:
    biasing = _biasing(config)
    if biasing is None or biasing.name not in BIASES:
        return torch.zeros(config.num_experts)
    return state[_bias_key(layer, biasing)].float()


def _refuse(obstacles: Iterator[str]) -> None:
    found = list(obstacles)
    if found:
        raise ValueError(f"no stock architecture of transformers can express this model: {'; '.join(found)}")


def _obstacles(config: GPTConfig, architecture: str, **only: Any) -> Iterator[str]:
    """What this architecture cannot express; `only` are the options that it knows no other value of."""
    name, space, biasing = ARCHITECTURES[architecture], BIAS_SPACE.get(architecture), _biasing(config)
    learned = biasing is not None and biasing.name in BIASES
    if biasing is not None and not learned and biasing.name != "sinkhorn":  # which has no bias outside of training
        yield f"balancers: {biasing.name} chooses experts in a way of its own, in eval too"
    if biasing is not None and learned and biasing.space != space:
        where = "on " + ("no values" if space is None else f"the {space}")
        remedy = {
            None: "train with score=sigmoid, or balance by lei, gshard or phi",
            "scores": "train with balancers=[{name: eqb, space: scores}, {name: lei}], or with post_norm=true as Kolibri-1",
            "logits": "train with balancers=eqb+lei, or with post_norm=false as GLM-4-MoE",
        }[space]
        yield f"balancers: {biasing.name} has its bias on the {biasing.space}, {name} has one {where}; {remedy}"
    for option, value in only.items():
        if getattr(config, option) != value:
            yield f"{option}={getattr(config, option)}: in {name} it can only be {value}"
    if architecture == "glm4_moe" and config.num_groups is not None:
        if not learned:
            yield f"num_groups={config.num_groups}: without a bias on the scores groups are chosen by logits, {name}'s are not"
        if config.num_groups == config.num_experts:
            yield f"num_groups={config.num_groups}: {name}'s groups have at least two experts"


def _described(theirs: Any) -> GPTConfig:
    """A GPTConfig made of a stock configuration alone."""
    rope = theirs.rope_parameters
    required: dict[str, tuple[Any, Any]] = {
        "hidden_act": (theirs.hidden_act, "silu"),
        "attention_bias": (getattr(theirs, "attention_bias", False), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    dense, dense_hidden = 0, getattr(theirs, "intermediate_size", None)
    if theirs.model_type == "kolibri1":
        required["layer_types"] = (sorted(set(theirs.layer_types)), ["sliding_attention"])
        required["sliding_window"] = (theirs.sliding_window, max(theirs.sliding_window, theirs.max_position_embeddings))
        special: dict[str, Any] = {
            "num_experts": theirs.num_experts,
            "shared_hidden": shared_width(theirs),
            "score": "sigmoid",
            "post_norm": True,
            "balancers": "eqb+lei",
        }
    elif theirs.model_type == "glm4_moe":
        required["use_qk_norm"] = (theirs.use_qk_norm, True)
        dense = theirs.first_k_dense_replace
        grouped = theirs.n_group > 1
        special = {
            "num_experts": theirs.n_routed_experts,
            "shared_hidden": shared_width(theirs),
            "score": "sigmoid",
            "routed_scale": float(theirs.routed_scaling_factor),
            "num_groups": theirs.n_group if grouped else None,
            "group_top_k": theirs.topk_group if grouped else None,
            "balancers": "loss_free",
        }
    else:
        dense = len(theirs.mlp_only_layers)
        required["decoder_sparse_step"] = (theirs.decoder_sparse_step, 1)
        required["mlp_only_layers"] = (sorted(theirs.mlp_only_layers), list(range(dense)))
        required["sliding_window"] = (theirs.sliding_window, None)
        special = {
            "num_experts": theirs.num_experts,
            "score": "softmax",
            "balancers": [{"name": "gshard", "coeff": theirs.router_aux_loss_coef}],
        }
    for name, (value, right) in required.items():
        if value != right:
            raise ValueError(f"{name}={value!r}: a GPT can only express {right!r}")
    return GPTConfig(
        vocab_size=theirs.vocab_size,
        d_model=theirs.hidden_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        max_seq_len=theirs.max_position_embeddings,
        rope_theta=float(rope["rope_theta"]),
        norm_eps=theirs.rms_norm_eps,
        num_dense_layers=dense,
        dense_hidden=dense_hidden,
        top_k=theirs.num_experts_per_tok,
        expert_hidden=theirs.moe_intermediate_size,
        normalize_weights=bool(theirs.norm_topk_prob),
        tie_embeddings=theirs.tie_word_embeddings,
        init_std=theirs.initializer_range,
        **special,
    )


def _same_model(one: PreTrainedConfig, other: PreTrainedConfig) -> bool:
    """Whether two stock configurations describe the same weights and the same computation."""
    ignored = {OURS, "architectures", "dtype", "transformers_version", "_name_or_path", "use_cache"}
    ignored |= {"bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits"}
    first, second = ({k: v for k, v in config.to_dict().items() if k not in ignored} for config in (one, other))
    return first == second
