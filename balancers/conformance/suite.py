"""Runs the rows against a router."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .adapter import Adapter, NotApplicable
from .processes import RankPool, RanksFailed
from .rows import ROWS, Row
from .subject import Failed, Subject, one_line

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "n/a"


@dataclass(frozen=True)
class Result:
    """What a check found: `status` is "pass", "fail" or "n/a", `reason` one line of evidence."""

    row: Row
    status: str
    reason: str


def run_suite(adapter: Adapter, rows: Iterable[int] | None = None, pool: RankPool | None = None) -> list[Result]:
    """Run the rows (all of them by default) against a router.

    The caller's random state and warnings are left alone; what torch.compile has cached is dropped (row 5 and 15 compile).

    Args:
        rows: numbers of `ROWS`.
        pool: ranks to share between calls; without it they are started here, if a row needs them, and stopped again.

    Raises:
        ValueError: if a row does not exist.
    """
    numbers = [row.number for row in ROWS] if rows is None else list(rows)
    by_number = {row.number: row for row in ROWS}
    for number in numbers:
        if number not in by_number:
            raise ValueError(f"there is no row {number}; the rows are 1 to {len(ROWS)}")
    if pool is None:
        with RankPool() as own:
            return run_suite(adapter, numbers, own)
    subject = Subject(adapter, pool)
    with torch.random.fork_rng(devices=[]):
        return [_run(by_number[number], subject) for number in numbers]


def _run(row: Row, subject: Subject) -> Result:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            return Result(row, PASS, row.check(subject))
    except Failed as failure:
        return Result(row, FAIL, str(failure))
    except NotApplicable as reason:
        return Result(row, NOT_APPLICABLE, str(reason))
    except RanksFailed as error:
        return Result(row, FAIL, f"on several ranks: {str(error).splitlines()[0]}")
    except Exception as error:
        return Result(row, FAIL, one_line(error))
