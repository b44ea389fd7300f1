"""The 26 rows: what goes wrong with routers in public, the value a router must show instead, and the check.

Each row is a failure that users of public frameworks reported; `seen` says where.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .check_choice import groups, nan_rows, odd_sizes, sign, ties, value_range
from .check_layer import capacity, empty_expert
from .check_life import dtype, eval_leak, graph_breaks, hidden_globals, meta_init, rebinding, recompute, silent_no_op
from .check_losses import double_softmax, metrics, perfect_balance, pooling
from .check_masks import packing, padding, polarity
from .check_ranks import accumulation, empty_rank, tensor_parallel
from .subject import Subject


@dataclass(frozen=True)
class Row:
    """One row of the suite.

    Attributes:
        number, name: 1..26, and a few words.
        fault: the failure seen in public, and `seen`: where.
        target: the right value.
        remedy: what to do about a failure, one line.
        check: returns what was seen; raises Failed with the evidence, or NotApplicable with the reason.
    """

    number: int
    name: str
    fault: str
    seen: str
    target: str
    remedy: str
    check: Callable[[Subject], str]


ROWS = (
    Row(
        1,
        "padding",
        "losses, counts or biases count padding",
        "transformers#28505, Megatron-LM#1984, prime-rl#1332",
        "a batch with padding equals the batch without: counts, losses, biases, metrics, gradients",
        "take a mask in forward and leave padding out of every count, mean and loss",
        padding,
    ),
    Row(
        2,
        "mask polarity",
        "one file documents the mask both ways",
        "Megatron-LM#5569",
        "mask True = real token; a wrong shape or dtype is an error",
        "accept bool of the batch's shape alone, True = real, and raise otherwise",
        polarity,
    ),
    Row(
        3,
        "double softmax",
        "probabilities are returned as logits and softmaxed again",
        "transformers#45120",
        "logits are raw; the loss sees the full distance from balance to collapse",
        "return x W^T as logits and take the softmax once, in the loss",
        double_softmax,
    ),
    Row(
        4,
        "eval leak",
        "validation forwards change counts or biases",
        "torchtitan#4148",
        "eval forwards leave every buffer bit-identical, with and without grad",
        "count only where self.training (torch.is_grad_enabled is not the same)",
        eval_leak,
    ),
    Row(
        5,
        "recomputation",
        "activation checkpointing counts a token twice",
        "Automodel#3247",
        "equal counts with none, reentrant and non-reentrant checkpointing, and torch.compile",
        "do not count while autograd runs (torch._C._current_graph_task_id() != -1)",
        recompute,
    ),
    Row(
        6,
        "accumulation and ranks",
        "strength or value depends on microbatches or ranks",
        "Megatron-LM#1652, #5047, maxtext#1483",
        "1 batch = n microbatches = n ranks, uneven and empty ones too",
        "sum counts over the step and its ranks, and scale balance losses as the main loss is scaled",
        accumulation,
    ),
    Row(
        7,
        "dtype",
        "bias or counts fall to bf16",
        "Megatron-LM#1482, #7081",
        "bias float32 and counts integer through .to(bfloat16) and .half()",
        "keep the dtype of balancing buffers in _apply, and count in integers",
        dtype,
    ),
    Row(
        8,
        "rebinding",
        "a buffer is rebound and the checkpoint stores zeros",
        "torchtitan#1222, DeepSpeed#8358",
        "in-place updates; save, load, next step bit-identical; missing state raises",
        "register state as a persistent buffer and update it with copy_",
        rebinding,
    ),
    Row(
        9,
        "meta init",
        "accumulators are garbage after to_empty()",
        "prime-rl#2953",
        "reset_parameters initialises every buffer",
        "fill every buffer in reset_parameters, not in __init__ alone",
        meta_init,
    ),
    Row(
        10,
        "NaN",
        "a NaN row gives repeated or out-of-range ids",
        "vllm#39391, sglang#30079",
        "a clear error, or K distinct ids in range, counted",
        "check the logits before top-k; raise, or route such rows as zeros and count them",
        nan_rows,
    ),
    Row(
        11,
        "ties",
        "recomputation or another device flips ties",
        "Automodel#3140",
        "the lowest index wins; equal logits give 0..K-1",
        "torch.topk promises no order: use a stable sort, or put the index into the key",
        ties,
    ),
    Row(
        12,
        "empty rank",
        "a rank without tokens detaches its graph",
        "PaddleFormers#3010",
        "forward, backward and the step work with no token",
        "no early return for empty batches, and no division by the number of tokens without a clamp",
        empty_rank,
    ),
    Row(
        13,
        "empty expert",
        "an expert without tokens gets a non-zero or NaN gradient",
        "pytorch#172439",
        "exactly zero",
        "zero the gradients of experts without rows",
        empty_expert,
    ),
    Row(
        14,
        "capacity",
        "capacity above the tokens, misspelt policies",
        "DeepSpeed#8155, #6809, Megatron-LM#815",
        "clamped and validated",
        "clamp the capacity to the tokens, and refuse factors that are not above 0",
        capacity,
    ),
    Row(
        15,
        "syncs",
        "bincount, .item() and .tolist() break graphs and wait for the device",
        "pytorch#192343",
        "the router compiles with fullgraph=True, and nothing in the graph waits for data",
        "count with scatter_add, and keep numbers on the device",
        graph_breaks,
    ),
    Row(
        16,
        "packing",
        "a pack counts as one sequence in sequence-level balance",
        "Megatron-LM#6108",
        "per document",
        "take document ids, and count per document",
        packing,
    ),
    Row(
        17,
        "groups",
        "ruled-out groups are filled with 0 while biased scores are negative",
        "DeepSeek-V3#741",
        "-inf",
        "fill ruled-out experts with -inf",
        groups,
    ),
    Row(
        18,
        "pooling",
        "one loss pooled over layers hides opposite collapse",
        "Qwen3#1418",
        "per layer",
        "compute the loss per layer and add the layers' losses",
        pooling,
    ),
    Row(
        19,
        "metrics",
        "rank-local counts called global; thousands of keys",
        "trl#6514, Megatron-LM#2398",
        "global integer counts; the keys do not grow with the model",
        "sum integer counts over ranks, and summarise over layers and experts",
        metrics,
    ),
    Row(
        20,
        "silent no-op",
        "a bias is declared and never updated",
        "maxtext#2494",
        "a training run that never calls the step warns once, naming the call",
        "warn once when weights change and the balancing step is never called",
        silent_no_op,
    ),
    Row(
        21,
        "scale words",
        "is f divided by K?",
        "OLMoE#45",
        "every loss has the value that it states at perfect balance, whatever K is",
        "divide f by T K, and state the value at perfect balance",
        perfect_balance,
    ),
    Row(
        22,
        "hidden globals",
        "a module-level list of losses leaks",
        "megablocks#119",
        "no module-level state",
        "keep what a step gathers on the module that gathered it",
        hidden_globals,
    ),
    Row(
        23,
        "odd sizes",
        "K = E, K = 1, E no power of two, T = 1, T K < E end in asserts or infinities",
        "PaddleFleet#1775",
        "defined results",
        "no divisibility asserts; a cutoff that does not exist changes nothing",
        odd_sizes,
    ),
    Row(
        24,
        "sign of the bias",
        "s - bias in one path, s + bias in another",
        "Megatron-LM#6802",
        "the bias is added; the four-token vector; MaxVio falls in a simulation",
        "one convention: the bias is ADDED to what top-k sees",
        sign,
    ),
    Row(
        25,
        "range of the histogram",
        "raw logits in a histogram made for sigmoid clip",
        "marin#7891",
        "refused with a message",
        "refuse scores outside the histogram's range, or use exact order statistics",
        value_range,
    ),
    Row(
        26,
        "tensor parallelism",
        "a histogram that ranks share is summed over them",
        "torchtitan#4412",
        "sums run over the ranks that own distinct tokens",
        "give the step the group of ranks with distinct tokens",
        tensor_parallel,
    ),
)
"""The suite, in the order of docs/conformance.md."""
