"""`balance(model, "eqb+lei")`: our balancers behind the gates of a transformers model, and back again.

Everything is added through hooks, so classes, weights and state-dict keys stay what they are:

    base model   before its forward, the attention mask joins the keyword arguments that travel to every layer
    attention    takes it out again, and leaves it with the layer's router (inside what activation checkpointing repeats)
    gate         after its forward, the router chooses anew from its logits, and observes
    whole model  after its forward, the loss is anchored: injected gradients follow its scale

Shape suffixes: B batch, S sequence, T = B * S tokens, E experts, K top-k.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...balancers import Balancer, anchor_loss, make_balancers
from ...balancers.routing import NanPolicy
from ..behind import ROUTER, Batch, GateRouter
from .gates import FAMILIES, Convention, correction_bias, gates
from .state import save_balancers

MASK = "evenload_mask"  # the keyword argument in which the attention mask travels to the layers
UNDO = "_evenload_undo"


@dataclass
class Undo:
    """What `unbalance` needs: the hooks, and the attributes to restore."""

    hooks: list[RemovableHandle]
    aux_loss: float | None
    unsaved: set[str]


def balance(
    model: nn.Module, balancers: Any = "eqb+lei", *, measure_residual: bool = False, nan: NanPolicy = "raise"
) -> nn.Module:
    """Put balancers behind the gates of a transformers model, in place. Returns the model.

    Scores, normalisation, scaling and groups are the model's own. Padding is known from the 2-D `attention_mask`, documents
    from `position_ids` that start again at 0. The loss that the model returns is anchored (`anchor_loss`), so injected
    gradients follow gradient accumulation, loss scaling and the Trainer's `num_items_in_batch`; a loss of your own needs
    `evenload.anchor_loss`. While it is balanced, the model's auxiliary loss is off (its coefficient is 0).

    Call `evenload.balance_step(model)` before every optimizer step, or give the Trainer a `BalanceCallback`.

    With "none" the model computes exactly what it did, auxiliary loss included, and `balance_step` reports its balance.

    Where gates have a selection bias of their own (DeepSeek-V3, GLM-4-MoE, Kolibri-1), a balancer's bias starts from it,
    works in its place, and is in it again whenever a state dict is taken. Other models have no place for a bias:
    `save_pretrained` leaves a folder that stock transformers loads and routes WITHOUT the bias, and writes the balancers'
    state beside it for `load_balancers`. Balancers without a bias ("lei", "gshard") need nothing of the kind.

    Args:
        model: a causal LM or another model of the families in `FAMILIES`, or anything that holds one. Before it is wrapped
            or compiled.
        balancers: as in `evenload.Router`; names or classes, since every layer builds its own.
        measure_residual, nan: as in `evenload.Router`.

    Raises:
        ValueError: no gate that is known, a model that is balanced already, or balancers that do not fit the gates.
    """
    found = list(gates(model))
    head: Any = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if head is None or not found:
        raise ValueError(
            f"no mixture-of-experts gate that is known in this {type(model).__name__}; known are those of {FAMILIES}"
        )
    if hasattr(head, UNDO):
        raise ValueError(f"this {type(head).__name__} is balanced already; call unbalance(model) first")
    routers = [_router(gate, rule, balancers, measure_residual=measure_residual, nan=nan) for _, gate, rule in found]
    layers = list(_layers(model))

    hooks = [head.register_forward_hook(partial(_anchor, _position(head, "labels")), with_kwargs=True)]
    for (_, gate, rule), router in zip(found, routers, strict=True):
        gate.add_module(ROUTER, router)
        hooks.append(gate.register_forward_hook(_route))
        if rule.bias_space is not None:
            hooks.append(gate.register_state_dict_pre_hook(_give_back_bias))
    for base, position in {base: _position(base, "attention_mask") for base, _, _ in layers}.items():
        hooks.append(base.register_forward_pre_hook(partial(_send_mask, position), with_kwargs=True))
    for _, attention, routed in layers:
        behind = None if routed is None else routed.get_submodule(ROUTER)
        hooks.append(attention.register_forward_pre_hook(partial(_receive_mask, behind), with_kwargs=True))

    unsaved = {name for name in head.state_dict() if f".{ROUTER}." in name}
    aux_loss = getattr(head, "router_aux_loss_coef", None)
    if len(routers[0].balancers) and aux_loss is not None:
        head.router_aux_loss_coef = 0.0
    head._keys_to_ignore_on_save = set(head._keys_to_ignore_on_save or ()) | unsaved
    head.save_pretrained = partial(_save_pretrained, head)  # a partial, so that a copy of the model saves the copy
    setattr(head, UNDO, Undo(hooks, aux_loss, unsaved))
    return model


def unbalance(model: nn.Module) -> nn.Module:
    """Take out what `balance` put in, in place. A selection bias stays where the gates have a place for it. Returns the model.

    Raises:
        ValueError: if the model is not balanced.
    """
    head: Any = next((module for module in model.modules() if hasattr(module, UNDO)), None)
    if head is None:
        raise ValueError(f"this {type(model).__name__} is not balanced; there is nothing to undo")
    undo: Undo = getattr(head, UNDO)
    for hook in undo.hooks:
        hook.remove()
    for _, gate, rule in gates(model):
        if rule.bias_space is not None:
            _give_back_bias(gate)
        delattr(gate, ROUTER)
    if undo.aux_loss is not None:
        head.router_aux_loss_coef = undo.aux_loss
    head._keys_to_ignore_on_save -= undo.unsaved
    del head.save_pretrained
    delattr(head, UNDO)
    return model


def _router(gate: Any, rule: Convention, spec: Any, **options: Any) -> GateRouter:
    """A router for one gate, whose bias starts from the gate's own."""
    built = make_balancers(spec)
    biasing = next((balancer for balancer in built if balancer.sets_bias), None)
    if biasing is not None and rule.bias_space is not None:
        _fit_bias(gate, rule, biasing)
    router = GateRouter(
        None,
        gate.num_experts,
        gate.top_k,
        balancers=built,
        score=rule.score,
        normalize=rule.normalize,
        scale=rule.scale,
        num_groups=rule.num_groups,
        group_top_k=rule.group_top_k,
        **options,
    )
    router.to(gate.weight.device).train(gate.training)
    if biasing is not None and rule.bias_space is not None:
        biasing.get_buffer("bias").copy_(correction_bias(gate))
    return router


def _fit_bias(gate: nn.Module, rule: Convention, biasing: Balancer) -> None:
    """Let the balancer's bias be of the kind that the gate has, or refuse."""
    if "space" in inspect.signature(type(biasing)).parameters and rule.bias_space is not None:
        biasing.space = rule.bias_space
    fitting = "eqb, qb, qb_histogram, loss_free" if rule.bias_space == "scores" else "eqb, qb"
    if biasing.space != rule.bias_space or biasing.name not in fitting.split(", "):
        raise ValueError(
            f"{biasing.name} cannot take the place of {type(gate).__name__}'s own selection bias, one number per expert on the "
            f"{rule.bias_space}; use one of {fitting}, or balancers without a bias (lei, gshard, phi)"
        )


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, nn.Module | None]]:
    """(base model, its layer's attention, the layer's gate or None) for every layer of every base model with gates."""
    for base in model.modules():
        layers = getattr(base, "layers", None)
        if not isinstance(base, PreTrainedModel) or not isinstance(layers, nn.ModuleList) or not any(gates(layers)):
            continue
        for layer in layers:
            yield base, layer.get_submodule("self_attn"), next((gate for _, gate, _ in gates(layer)), None)


def _position(module: nn.Module, name: str) -> int:
    """Where a positional argument of this name would stand; far away where there is none."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index(name) if name in names else len(names)


def _argument(name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _send_mask(position: int, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = _argument("attention_mask", position, args, kwargs)
    if mask is None or not base.training:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {shape}; a balanced model reads padding from one of shape (batch, sequence). For packed "
            "documents leave it out and give position_ids"
        )
    return args, {**kwargs, MASK: mask.bool()}


def _receive_mask(router: Any, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = kwargs.pop(MASK, None)
    if router is not None and router.training:
        hidden = args[0] if args else kwargs["hidden_states"]
        shape = hidden.shape[:2]
        positions = kwargs.get("position_ids")
        documents = None if positions is None else (positions == 0).cumsum(dim=-1).expand(shape)
        router.batch = Batch(shape, mask, documents)
    return args, kwargs


def _route(gate: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The router's choice in place of the gate's, or None where the gate's own stands."""
    logits_TE, weights_TK, indices_TK = output
    routing = gate.get_submodule(ROUTER).choose(logits_TE, indices_TK)
    return None if routing is None else (logits_TE, routing.weights.to(weights_TK.dtype), routing.indices)


@torch.no_grad()
def _give_back_bias(gate: nn.Module, *_: Any) -> None:
    """Copy the balancer's bias into the gate's own."""
    biasing = gate.get_submodule(ROUTER).biasing
    if isinstance(biasing, Balancer):
        correction_bias(gate).copy_(biasing.get_buffer("bias"))


def _anchor(position: int, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Anchor the loss that the model has computed itself."""
    labels = _argument("labels", position, args, kwargs)
    loss = (output[0] if labels is not None else None) if isinstance(output, tuple) else output.get("loss")
    if loss is None or not loss.requires_grad:
        return None
    anchored = anchor_loss(loss, head, _share(head, labels, kwargs))
    if isinstance(output, tuple):
        return (anchored, *output[1:])
    output["loss"] = anchored
    return output


def _share(head: nn.Module, labels: Tensor | None, kwargs: dict[str, Any]) -> Tensor | float:
    """The share of the step's targets that this forward has, where its loss is a sum divided by all of them."""
    total = kwargs.get("num_items_in_batch")
    shifted = kwargs.get("shift_labels")
    if shifted is None and labels is not None and "ForCausalLM" in type(head).__name__:
        shifted = labels[..., 1:]
    targets = labels if shifted is None else shifted
    if total is None or targets is None:
        return 1.0
    return (targets != -100).sum() / total


def _save_pretrained(head: Any, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
    """`save_pretrained` of the model's class, which leaves our keys out; they go beside it."""
    type(head).save_pretrained(head, save_directory, is_main_process=is_main_process, **kwargs)
    if is_main_process:
        save_balancers(head, save_directory)
