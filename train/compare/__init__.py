"""`evenload compare`: balancers side by side, each with the same initialisations and the same data, as one command.

A comparison is a grid of balancers, swept settings and seeds (plan), trained by the code of `evenload train`, several runs at a
time (runs). What the runs leave in their folders becomes two tidy CSV files (results), and those with the curves a
self-contained HTML page (report, figures).
"""

from .compare import Outcome, compare

__all__ = ["Outcome", "compare"]
