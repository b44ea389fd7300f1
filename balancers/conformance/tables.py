"""Results as text, Markdown and JSON."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .rows import ROWS
from .suite import FAIL, NOT_APPLICABLE, PASS, Result

Results = Mapping[str, Sequence[Result]]
MARKS = {PASS: "pass", FAIL: "**FAIL**", NOT_APPLICABLE: "n/a"}


def text_table(results: Results, width: int | None = None) -> str:
    """For a terminal: one table per target, wrapped to its width, a failure followed by its remedy."""
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    parts = []
    for target, rows in results.items():
        names = max(len(result.row.name) for result in rows)
        lines = [target, "-" * len(target)]
        for result in rows:
            head = f"{result.row.number:>2}  {result.row.name:<{names}}  {_shout(result.status):<4}  "
            lines += _wrapped(head, result.reason, width)
            if result.status == FAIL:
                lines += _wrapped(" " * len(head), f"remedy: {result.row.remedy}", width)
        parts.append("\n".join([*lines, "", _count(rows)]))
    return "\n\n".join(parts)


def markdown_table(results: Results) -> str:
    """Targets side by side as columns; below, what failed and what would help."""
    targets = list(results)
    by_number = {target: {result.row.number: result for result in rows} for target, rows in results.items()}
    shown = [row for row in ROWS if any(row.number in found for found in by_number.values())]
    header = ["#", "row", *(f"`{target}`" for target in targets)]
    lines = ["| " + " | ".join(header) + " |", "|---|---|" + "---|" * len(targets)]
    for row in shown:
        cells = [MARKS[by_number[target][row.number].status] for target in targets]
        lines.append("| " + " | ".join([str(row.number), row.name, *cells]) + " |")
    totals = [f"{sum(r.status == PASS for r in rows)} / {sum(r.status == FAIL for r in rows)}" for rows in results.values()]
    lines.append("| " + " | ".join(["", "pass / fail", *totals]) + " |")
    notes = []
    for row in shown:
        evidence: dict[str, list[str]] = {}
        for target in targets:
            result = by_number[target][row.number]
            if result.status == FAIL:
                evidence.setdefault(result.reason, []).append(f"`{target}`")
        notes += [f"* **{row.number} {row.name}**, {', '.join(names)}: {_plain(why)}." for why, names in evidence.items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def as_json(results: Results) -> list[dict[str, Any]]:
    """One object per target and row."""
    return [
        {
            "target": target,
            "row": result.row.number,
            "name": result.row.name,
            "status": result.status,
            "reason": result.reason,
            "remedy": result.row.remedy if result.status == FAIL else None,
        }
        for target, rows in results.items()
        for result in rows
    ]


def list_of_rows(width: int | None = None) -> str:
    """Every row: what goes wrong in public, where it was seen, and the right value."""
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    names = max(len(row.name) for row in ROWS)
    lines = []
    for row in ROWS:
        head = f"{row.number:>2}  {row.name:<{names}}  "
        lines += _wrapped(head, f"{row.fault} ({row.seen})", width)
        lines += _wrapped(" " * len(head), f"right: {row.target}", width)
    return "\n".join(lines)


def failed(results: Results) -> int:
    """How many checks failed."""
    return sum(result.status == FAIL for rows in results.values() for result in rows)


def _count(rows: Sequence[Result]) -> str:
    passed, wrong, absent = (sum(result.status == status for result in rows) for status in (PASS, FAIL, NOT_APPLICABLE))
    return f"{passed} passed, {wrong} failed, {absent} not applicable"


def _shout(status: str) -> str:
    return status.upper() if status == FAIL else status


def _wrapped(head: str, text: str, width: int) -> list[str]:
    room = max(30, width - len(head))
    lines = textwrap.wrap(text, room) or [""]
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_").replace("*", "\\*")
