"""Adapter of the conformance suite for the routers of Hugging Face transformers, as they are.

A tiny random model is built from the stock configuration class; the router module, the load-balancing loss and the buffers
are the library's own, unchanged. Nothing is downloaded.

Shape suffixes: T tokens, E experts, K experts per token.
"""

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..balancers.conformance import Adapter, Decision, NotApplicable, StepReport

_DEEPSEEK = {
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_LATE_EXPERTS = {"first_k_dense_replace": 0, "n_shared_experts": 1, "num_nextn_predict_layers": 0}
# What each architecture calls the number of experts, and options of its own; None takes one of the common ones away.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("num_local_experts", {}),
    "qwen2_moe": ("num_experts", {"shared_expert_intermediate_size": 8}),
    "qwen3_moe": ("num_local_experts", {}),
    "olmoe": ("num_experts", {"head_dim": None}),  # its attention knows no other than hidden_size / heads
    "deepseek_v3": ("n_routed_experts", _DEEPSEEK | _LATE_EXPERTS),
    "glm4_moe": ("n_routed_experts", _LATE_EXPERTS),
    "gpt_oss": ("num_local_experts", {}),
}


class StockRouter(nn.Module):
    """A stock model of one layer, seen as its router; remembers what the router returned for the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        router_class = cast(Any, model)._can_record_outputs["router_logits"].target_class
        self.path = next(name for name, module in model.named_modules() if isinstance(module, router_class))
        self.seen: list[tuple[Tensor, Tensor | None]] = []

    @property
    def router(self) -> nn.Module:
        return self.model.get_submodule(self.path)

    @property
    def block(self) -> nn.Module:
        """The MoE block around the router."""
        return self.model.get_submodule(self.path.rpartition(".")[0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor, Tensor], self.router(x))


class StockLayer(nn.Module):
    """A stock MoE block for x (T, D)."""

    def __init__(self, stock: StockRouter) -> None:
        super().__init__()
        self.block = stock.block
        self.gate = [stock.router]  # not registered a second time

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x[None])
        return cast(Tensor, (out[0] if isinstance(out, tuple) else out).squeeze(0))


class StockAdapter(Adapter):
    """The router of one of `ARCHITECTURES` in the installed transformers.

    Raises:
        ValueError: for an unknown architecture, with the known ones; where transformers is not installed.
    """

    takes_mask = True
    scope = "microbatch"  # its loss is Switch's, defined on a microbatch
    sums_over_ranks = False
    stated_in = "the Switch Transformer paper that its docstring cites"

    def __init__(self, architecture: str) -> None:
        if architecture not in ARCHITECTURES:
            raise ValueError(f"transformers:{architecture} is not known here; known: {', '.join(ARCHITECTURES)}")
        try:
            import transformers
        except ImportError as error:
            raise ValueError(f"transformers:{architecture} needs transformers: pip install transformers") from error
        self.architecture, self.name = architecture, f"transformers:{architecture}"
        self.version = str(transformers.__version__)
        self.has_groups = "n_shared_experts" in ARCHITECTURES[architecture][1]
        self.causal_lm = type(self._model(8, 2))

    def build(
        self,
        num_experts: int,
        top_k: int,
        *,
        num_groups: int | None = None,
        group_top_k: int | None = None,
        score: str | None = None,
    ) -> StockRouter:
        groups = {} if num_groups is None else {"n_group": num_groups, "topk_group": group_top_k}
        stock = StockRouter(self._model(num_experts, top_k, **groups))
        offset = getattr(stock.router, "bias", None)
        if offset is not None:  # gpt_oss's gate is affine
            nn.init.zeros_(offset)
        return stock

    def route(
        self, router: nn.Module, x: Tensor, *, mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Decision:
        logits, weights, indices = router(x)
        if self._loss_function is not None:  # the stock model hands its attention mask to the loss, and to the loss alone
            cast(StockRouter, router).seen.append((logits, mask))
        return Decision(indices, weights, logits)

    def gate(self, router: nn.Module) -> Tensor | None:
        return cast(Tensor, cast(StockRouter, router).router.weight)

    def bias(self, router: nn.Module) -> Tensor | None:
        return cast(Tensor | None, getattr(cast(StockRouter, router).router, "e_score_correction_bias", None))

    def state(self, router: nn.Module) -> dict[str, Tensor]:
        stock = cast(StockRouter, router)
        return {f"model.{stock.path}.{name}": buffer for name, buffer in stock.router.named_buffers()}

    def backward(self, model: nn.Module, loss: Tensor, share: float = 1.0) -> None:
        coefficient = cast(Any, self._layers(model)[0].model.config).to_dict().get("router_aux_loss_coef", 0.0)
        for value in self._losses(model):
            loss = loss + coefficient * value
        (loss * share).backward()

    def step(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> StepReport:
        losses = self._losses(model)
        for layer in self._layers(model):
            layer.seen.clear()
        return StepReport(losses={"aux_loss": torch.stack(losses).mean()} if losses else {})

    def stated_losses(self, logits: Tensor, top_k: int) -> dict[str, float]:
        """Its docstring refers to equations (4) to (6) of the Switch Transformer, whose loss is 1 (times its coefficient)."""
        return {"aux_loss": 1.0}

    def reset(self, router: nn.Module) -> None:
        cast(Any, router).model.init_weights()

    def gradient_of_copies(self, copies: int) -> Tensor:
        """Of the balance loss alone, in the whole model: what is left after subtracting a step without that loss.

        The calls are those of transformers' Trainer, which tells the model how many tokens the step has and scales nothing
        itself.
        """
        if self._loss_function is None:
            raise NotApplicable("has no balance loss")
        ids = torch.arange(24).view(2, 12) % 16
        gradients = []
        for with_loss in (True, False):
            torch.manual_seed(0)
            stock = self.build(8, 2)
            for _ in range(copies):
                out = stock.model(
                    input_ids=ids, labels=ids, output_router_logits=with_loss, num_items_in_batch=copies * ids[:, 1:].numel()
                )
                out.loss.backward()
            gradients.append(cast(Tensor, cast(Tensor, self.gate(stock)).grad).double())
        return gradients[0] - gradients[1]

    def layer(self, num_experts: int, top_k: int, *, capacity_factor: float | None = None) -> nn.Module:
        if capacity_factor is not None:
            raise NotApplicable("dropless: there is no capacity")
        return StockLayer(self.build(num_experts, top_k))

    def layer_gate(self, layer: nn.Module) -> Tensor:
        return cast(Tensor, cast(StockLayer, layer).gate[0].weight)

    def expert_parameters(self, layer: nn.Module) -> dict[str, Tensor]:
        return dict(cast(nn.Module, cast(StockLayer, layer).block.experts).named_parameters())

    @property
    def _loss_function(self) -> Any:
        """The load-balancing loss of the architecture's module, or None."""
        return getattr(sys.modules[self.causal_lm.__module__], "load_balancing_loss_func", None)

    def _losses(self, model: nn.Module) -> list[Tensor]:
        """Of every microbatch since the last step, over all layers at once as the stock model calls it."""
        layers = self._layers(model)
        losses = []
        for microbatch in zip(*(layer.seen for layer in layers), strict=True):
            top_k = cast(Any, layers[0].router).top_k
            experts = cast(Any, layers[0].router).num_experts
            losses.append(self._loss_function(tuple(logits for logits, _ in microbatch), experts, top_k, microbatch[0][1]))
        return losses

    @staticmethod
    def _layers(model: nn.Module) -> list[StockRouter]:
        return [module for module in model.modules() if isinstance(module, StockRouter)]

    def _model(self, num_experts: int, top_k: int, **options: Any) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        experts, own = ARCHITECTURES[self.architecture]
        sizes = {
            "vocab_size": 16,
            "hidden_size": num_experts,
            "intermediate_size": 8,
            "moe_intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "max_position_embeddings": 32,
            "num_experts_per_tok": top_k,
            "pad_token_id": 0,
            experts: num_experts,
        }
        if self.has_groups:
            sizes |= {"n_group": 1, "topk_group": 1}
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # token ids beyond so small a vocabulary are no news here
        try:
            chosen = {name: value for name, value in (sizes | own | options).items() if value is not None}
            config = AutoConfig.for_model(self.architecture, **chosen)
            return cast(nn.Module, AutoModelForCausalLM.from_config(config))
        finally:
            logging.set_verbosity(verbosity)
