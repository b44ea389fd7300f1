"""GPT-MoE: a decoder whose mixture-of-experts layers take any router, and the parts it is made of."""

from .all_to_all import AllToAllDispatcher
from .attention import Attention, SequenceContext, sequence_context
from .cache import KVCache
from .config import GPTConfig, ParameterCount
from .dispatch import Dispatcher, DispatchPlan, LocalDispatcher
from .experts import Experts
from .generate import generate
from .gpt import GPT, Block, GPTOutput
from .layers import DenseFFN, Linear, RMSNorm, swiglu
from .loss import chunked_cross_entropy
from .moe import MoELayer
from .recompute import ACTIVATION_CHECKPOINTING

__all__ = [
    "ACTIVATION_CHECKPOINTING",
    "GPT",
    "AllToAllDispatcher",
    "Attention",
    "Block",
    "DenseFFN",
    "DispatchPlan",
    "Dispatcher",
    "Experts",
    "GPTConfig",
    "GPTOutput",
    "KVCache",
    "Linear",
    "LocalDispatcher",
    "MoELayer",
    "ParameterCount",
    "RMSNorm",
    "SequenceContext",
    "chunked_cross_entropy",
    "generate",
    "sequence_context",
    "swiglu",
]
