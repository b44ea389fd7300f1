"""The arithmetic of routing as plain functions on tensors.

Each function here is the torch reference: it defines the result to the bit, ties included. This module is the one
door through which the rest of the library reaches them, so that a faster kernel can be chosen here and nowhere else.
"""

from .histogram import uniform_histogram
from .radix import bf16_key, bf16_unkey, canonical, dense_histogram, high_byte_histogram, low_byte_histogram
from .selection import expert_counts, top_k

__all__ = [
    "bf16_key",
    "bf16_unkey",
    "canonical",
    "dense_histogram",
    "expert_counts",
    "high_byte_histogram",
    "low_byte_histogram",
    "top_k",
    "uniform_histogram",
]
