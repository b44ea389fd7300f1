"""Conformance suite: 26 faults seen in public MoE routers, as checks that run against any router.

    results = run_suite(adapter_for(MyRouter))       # a router class, a Balancer class, or an Adapter
    print(text_table({"mine": results}))

docs/conformance.md has the rows and how to write an adapter.
"""

from .adapter import Adapter, Decision, NotApplicable, StepReport
from .modules import ModuleAdapter, adapter_for, load_target
from .processes import RankPool
from .routers import RouterAdapter
from .rows import ROWS, Row
from .suite import Result, run_suite
from .tables import as_json, markdown_table, text_table

__all__ = [
    "ROWS",
    "Adapter",
    "Decision",
    "ModuleAdapter",
    "NotApplicable",
    "RankPool",
    "Result",
    "RouterAdapter",
    "Row",
    "StepReport",
    "adapter_for",
    "as_json",
    "load_target",
    "markdown_table",
    "run_suite",
    "text_table",
]
