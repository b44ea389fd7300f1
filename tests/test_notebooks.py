"""Every notebook runs from scratch, holds what it drew and printed, and says what it claims and whether that holds."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 400_000  # bytes
MACHINERY = runpy.run_path(str(FOLDER / "execute.py"))
execute, fingerprint = MACHINERY["execute"], MACHINERY["fingerprint"]

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook) -> list:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def figures(notebook) -> list[str]:
    return [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]


def verdicts(notebook) -> dict[int, str]:
    """{number of the claim: "holds" or "does not hold"}, as the last code cell prints them."""
    printed = "".join(output.get("text", "") for output in code_cells(notebook)[-1].outputs)
    return {int(number): word for number, word in re.findall(r"^(\d+)\. (holds|does not hold): .*\d", printed, re.M)}


def prose(notebook) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def claims(notebook) -> list[int]:
    """The numbers of the list under "## Claim"."""
    section = re.search(r"^## Claim\n(.*?)(?=^## |\Z)", prose(notebook), re.S | re.M)
    return [int(number) for number in re.findall(r"^(\d+)\. ", section.group(1), re.M)] if section else []


@each_notebook
def test_it_runs_from_scratch(path):
    stored = nbformat.read(path, as_version=4)
    notebook = execute(path, small=True, timeout=300)
    assert len(figures(notebook)) == len(figures(stored))
    assert list(verdicts(notebook)) == claims(notebook)


@each_notebook
def test_what_is_stored_is_what_its_cells_made(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    executed = notebook.metadata.get("evenload", {}).get("executed")
    assert executed == fingerprint(notebook), "stale outputs, or none: make notebooks"
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not [output for output in outputs(notebook) if output.output_type == "error" or output.get("name") == "stderr"]
    assert figures(notebook)
    assert path.stat().st_size < LARGEST


@each_notebook
def test_it_states_claims_shows_figures_and_judges(path):
    notebook = nbformat.read(path, as_version=4)
    assert re.match(r"# \S", notebook.cells[0].source)
    assert claims(notebook)
    assert re.search(r"^## What the figures? shows?$", prose(notebook), re.M)
    assert list(verdicts(notebook)) == claims(notebook)


def test_the_index_lists_every_notebook_with_its_verdict():
    index = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| \[(\S+)\]\((\S+\.ipynb)\) \| .* \| (.*) \| about \d+ s \|$", index, re.M)
    assert [link for _, link, _ in rows] == [path.name for path in NOTEBOOKS]
    for (name, link, judged), path in zip(rows, NOTEBOOKS, strict=True):
        assert name == Path(link).stem
        found = {int(number): word for number, word in re.findall(r"(\d+) (holds|does not hold)", judged)}
        assert found == verdicts(nbformat.read(path, as_version=4)), name


def test_a_cell_that_fails_fails_the_notebook(tmp_path):
    path = tmp_path / "broken.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("claim = 1"), new_code_cell("assert claim == 2")]), path)
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(path, small=True)
