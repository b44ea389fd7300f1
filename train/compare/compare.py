"""A comparison from its plan to its report."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data import load_data
from ..files import write_atomic
from ..interrupt import exit_on_sigterm
from ..lock import only_run
from ..runtime import tune_allocator
from .board import write_board
from .overhead import measure_overhead
from .plan import PlannedRun, make_plan
from .report import text_table, write_report
from .results import read_results, summarise, write_tables
from .runs import is_finished, refuse_other_runs, train_all


@dataclass
class Outcome:
    """How a comparison ended."""

    out: Path
    report: Path
    table: str  # the finished runs, per variant, as text
    failed: dict[PlannedRun, str]  # runs that ended with an error, and it
    interrupted: signal.Signals | None


def compare(name: str, overrides: Sequence[str] = (), *, quiet: bool = False) -> Outcome:
    """Run the comparison `evenload compare NAME OVERRIDES`; see `make_plan`. With `quiet` nothing is said meanwhile.

    Its folder holds results.csv, layers.csv, report.html, compare.yaml and the run folders. What is finished there is not
    trained again, and a report is written whatever happens to single runs.

    Raises ConfigError for what cannot be compared.
    """
    say: Callable[[str], None] = _silent if quiet else print
    plan = make_plan(name, overrides)
    plan.out.mkdir(parents=True, exist_ok=True)
    with only_run(plan.out):
        refuse_other_runs(plan.runs)
        missing = sum(not is_finished(run) for run in plan.runs)
        seeds = len(plan.runs) // len(plan.variants)
        grid = f"{len(plan.variants)} balancers x {seeds} seed{'s' if seeds > 1 else ''}"
        say(f"{grid}: {missing} of {len(plan.runs)} runs to train, {plan.jobs} at a time, in {plan.out}")
        write_atomic(plan.out / "compare.yaml", plan.config.to_yaml())
        if missing:
            with exit_on_sigterm():
                load_data(plan.config, say)  # tokens are prepared once, and not by each run
        trained = train_all(plan.runs, plan.jobs, quiet=quiet)
        results = read_results(plan)
        summaries = summarise(plan, results)
        write_tables(plan, results)
        write_board(plan, results)
        overhead = {}
        if not trained.interrupted:
            tune_allocator()
            overhead = measure_overhead(plan, say)
        report = write_report(plan, results, summaries, overhead, trained.failed)
        return Outcome(plan.out, report, text_table(plan, summaries, overhead), trained.failed, trained.interrupted)


def _silent(line: str) -> None:
    """Says nothing."""
