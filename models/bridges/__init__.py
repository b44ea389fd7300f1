"""Our balancers in other pretraining libraries: one file for each, which imports nothing of the library it serves.

from evenload.models.bridges import torchtitan      # torchtitan.balance(model, "eqb+lei")
from evenload.models.bridges import megatron        # megatron.balance(model, "eqb+lei")
"""
