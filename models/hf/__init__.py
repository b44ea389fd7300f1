"""Hugging Face transformers: our balancers behind the gates of their models, and checkpoints to and from their format.

Importing this package needs the extra `evenload[hf]`; nothing else in the library imports it.
"""

from .balance import balance, unbalance
from .convert import from_hf, to_hf
from .folder import load_hf, save_hf
from .gates import FAMILIES
from .state import load_balancers, save_balancers
from .trainer import BalanceCallback

__all__ = [
    "FAMILIES",
    "BalanceCallback",
    "balance",
    "from_hf",
    "load_balancers",
    "load_hf",
    "save_balancers",
    "save_hf",
    "to_hf",
    "unbalance",
]
