"""The shape of a GPT-MoE, as one dataclass of simple types (it doubles as an OmegaConf structured config)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

EXPERT_COMPUTE = ("auto", "grouped", "loop")


class ParameterCount(NamedTuple):
    """Parameters of a model: all of them, and those that one token is multiplied with.

    An embedding table that is only looked up counts as inactive; as the output head, its own or tied, it is active.
    """

    total: int
    active: int


@dataclass
class GPTConfig:
    """Everything that determines a GPT-MoE decoder.

    Attributes:
        vocab_size: rows of the token embedding.
        d_model: width of the residual stream.
        num_layers: blocks in total, dense and MoE.
        num_heads: query heads.
        num_kv_heads: key and value heads (grouped-query attention, arXiv 2305.13245); divides num_heads.
        head_dim: width of a head, even; None = d_model / num_heads.
        max_seq_len: longer inputs are refused.
        rope_theta: base of the rotary frequencies (arXiv 2104.09864).
        norm_eps: added to the mean square in every RMSNorm.
        post_norm: norm what comes out of attention and feed-forward as well, before it is added to the residual stream
            (sandwich norm, arXiv 2105.13290; Kolibri-1 has it).
        num_dense_layers: how many leading blocks have a dense feed-forward instead of experts.
        dense_hidden: hidden width of those; None = (top_k * expert_hidden + shared_hidden), the width a token sees elsewhere.
        num_experts, top_k, expert_hidden: E, K and F of every MoE layer.
        shared_hidden: hidden width of an expert that every token passes through; 0 = none.
        balancers: what `evenload.balancers.Router` accepts: a string such as "eqb+lei", or a list of {name: ..., option: ...}.
        score, normalize_weights, routed_scale, num_groups, group_top_k, measure_residual: passed to every Router.
        capacity_factor: None = dropless; otherwise an expert takes at most ceil(capacity_factor * T * K / E) training tokens.
        expert_compute: "grouped" (F.grouped_mm), "loop", or "auto" = grouped where it is legal.
        tie_embeddings: the output head is the token embedding.
        z_loss: coefficient of mean(logsumexp(logits)^2) on the language-model head (PaLM, arXiv 2204.02311).
        loss_chunk: tokens per chunk of the cross-entropy; logits of one chunk exist at a time.
        init_std: standard deviation of every weight matrix; projections into the residual stream get
            init_std / sqrt(2 * num_layers).

    Raises:
        ValueError: naming the field, its value and what would be right.
    """

    vocab_size: int = 4096
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    post_norm: bool = False
    num_dense_layers: int = 0
    dense_hidden: int | None = None
    num_experts: int = 16
    top_k: int = 2
    expert_hidden: int = 256
    shared_hidden: int = 0
    balancers: Any = "eqb+lei"
    score: str = "sigmoid"
    normalize_weights: bool = False
    routed_scale: float = 1.0
    num_groups: int | None = None
    group_top_k: int | None = None
    measure_residual: bool = False
    capacity_factor: float | None = None
    expert_compute: str = "auto"
    tie_embeddings: bool = True
    z_loss: float = 0.0
    loss_chunk: int = 512
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ValueError where the fields do not describe a model. Runs on construction, and again when a GPT is built."""
        positive = ["vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "max_seq_len", "num_experts"]
        positive += ["top_k", "expert_hidden", "loss_chunk"]
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1")
        for name in ("head_dim", "dense_hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; it must be at least 1, or null to derive it")
        for name in ("shared_hidden", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be >= 0 (0 switches it off)")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be > 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide d_model={self.d_model}; or give head_dim")
        if self.head_width % 2:
            raise ValueError(f"head_dim={self.head_width} is odd; rotary embeddings turn pairs, so give an even head_dim")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"num_dense_layers={self.num_dense_layers}; it must be between 0 and num_layers={self.num_layers}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} with num_experts={self.num_experts}; top_k must not exceed num_experts")
        if self.expert_compute not in EXPERT_COMPUTE:
            raise ValueError(f"expert_compute={self.expert_compute!r}; choose one of {', '.join(map(repr, EXPERT_COMPUTE))}")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor={self.capacity_factor}; it must be > 0, or null for dropless routing")

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def dense_width(self) -> int:
        """Hidden width of the dense feed-forward layers."""
        return self.top_k * self.expert_hidden + self.shared_hidden if self.dense_hidden is None else self.dense_hidden

    def num_parameters(self) -> ParameterCount:
        """Parameters of the model this describes, in total and active per token, without building it."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_width
        block = self.d_model * heads + 2 * self.head_width + (4 if self.post_norm else 2) * self.d_model
        dense = 3 * self.d_model * self.dense_width
        expert = 3 * self.d_model * self.expert_hidden
        per_moe_layer = self.num_experts * self.d_model + 3 * self.d_model * self.shared_hidden
        moe_layers = self.num_layers - self.num_dense_layers
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        common = (
            embeddings + self.d_model + self.num_layers * block + self.num_dense_layers * dense + moe_layers * per_moe_layer
        )
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.d_model
        return ParameterCount(
            total=common + moe_layers * self.num_experts * expert,
            active=common + moe_layers * self.top_k * expert - looked_up,
        )
