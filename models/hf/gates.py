"""What the gates of transformers' models compute: how logits become weights, and where a selection bias belongs.

Gates are known by the name of their class, so that this table loads none of transformers' modelling files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...balancers.routing import Score, Space

CORRECTION = "e_score_correction_bias"  # what DeepSeek-V3 and its heirs call the bias on the choice of experts


@dataclass(frozen=True)
class Convention:
    """How a gate routes, in the words of `evenload.balancers.route`.

    Attributes:
        score, normalize, scale, num_groups, group_top_k: as in `route`.
        bias_space: what the gate's own selection bias is added to; None = it has no such bias.
    """

    score: Score
    normalize: bool
    scale: float = 1.0
    num_groups: int | None = None
    group_top_k: int | None = None
    bias_space: Space | None = None


def _softmax(gate: Any) -> Convention:
    return Convention("softmax", bool(gate.norm_topk_prob))


def _normalized_softmax(gate: Any) -> Convention:
    """Mixtral's; and gpt-oss's, since a softmax over the chosen logits is the softmax over all, divided by its chosen part."""
    return Convention("softmax", True)


def _grouped_sigmoid(gate: Any) -> Convention:
    groups, kept = (gate.num_group, gate.topk_group) if gate.num_group > 1 else (None, None)
    return Convention("sigmoid", bool(gate.norm_topk_prob), float(gate.routed_scaling_factor), groups, kept, "scores")


def _sigmoid_of_logits(gate: Any) -> Convention:
    return Convention("sigmoid", bool(gate.norm_topk_prob), bias_space="logits")


GATES: dict[str, Callable[[Any], Convention]] = {
    "MixtralTopKRouter": _normalized_softmax,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "GptOssTopKRouter": _normalized_softmax,
    "DeepseekV3TopkRouter": _grouped_sigmoid,
    "Glm4MoeTopkRouter": _grouped_sigmoid,
    "Kolibri1TopKRouter": _sigmoid_of_logits,
}
FAMILIES = "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss, DeepSeek-V3, GLM-4-MoE, Kolibri-1"
"""The model families whose gates are known, for messages."""


def convention(module: nn.Module) -> Convention | None:
    """How this module routes, if it is a gate that `GATES` knows (or a subclass of one)."""
    for base in type(module).__mro__:
        if base.__name__ in GATES:
            return GATES[base.__name__](module)
    return None


def gates(model: nn.Module) -> Iterator[tuple[str, nn.Module, Convention]]:
    """(name, gate, convention) of every gate of a model, in module order."""
    for name, module in model.named_modules():
        if (found := convention(module)) is not None:
            yield name, module, found


def correction_bias(gate: nn.Module) -> Tensor:
    """The gate's own selection bias, (E,)."""
    return gate.get_buffer(CORRECTION)
