"""The documentation: every page is in the navigation, every link leads somewhere, every snippet runs, no number is stale."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

import evenload

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
PROGRAMS = ["guide/start.md", "guide/training_loop.md", "guide/hugging_face.md", "how/eqb.md"]  # each page is one program
REFERENCE = {
    "api/balancers.md": "balancers",
    "api/conformance.md": "balancers.conformance",
    "api/hf.md": "models.hf",
    "api/kernels.md": "kernels",
    "api/models.md": "models",
    "api/placement.md": "placement",
    "api/train.md": "train",
}


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, which names Python objects with tags of its own."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def code_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(page), re.S | re.M)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)


def anchors_of(page: str) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def pages_in(nav: list | str) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [
        page for entry in nav for part in (entry.values() if isinstance(entry, dict) else [entry]) for page in pages_in(part)
    ]


def test_every_page_is_in_the_navigation_once():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)["nav"]
    assert sorted(pages_in(nav)) == PAGES, "pages of docs/ and `nav` in mkdocs.yml differ"


@pytest.mark.parametrize("page", PAGES)
def test_links_stay_in_the_documentation_and_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page))):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (DOCS / page).parent / path if path else DOCS / page
        assert linked.is_file(), f"{page}: {target}"
        assert linked.resolve().is_relative_to(DOCS), f"{page}: {target}: the site has docs/ only; write the name as code"
        if linked.suffix != ".md":
            continue
        if anchor.startswith("evenload."):
            package, _, name = anchor.rpartition(".")
            assert hasattr(importlib.import_module(package), name), f"{page}: {target}"
        elif anchor:
            assert anchor in anchors_of(linked.resolve().relative_to(DOCS).as_posix()), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_code_is_python_and_included_files_are_there(page):
    for code in code_of(page):
        ast.parse(code)
    for path, last in re.findall(r'^--8<-- "([^:"]+)(?::\d+:(\d+))?"$', text_of(page), re.M):
        assert (ROOT / path).is_file(), f"{page}: {path}"
        assert len((ROOT / path).read_text().splitlines()) >= int(last or 0), f"{page}: {path} ends before line {last}"


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_snippets_of_a_page_run_in_order(page):
    program = "\n".join(code_of(page))
    assert program
    exec(compile(program, page, "exec"), {"__name__": "snippets"})


def test_every_balancer_has_its_page_and_its_options():
    for name, balancer in evenload.BALANCERS.items():
        text = text_of(f"how/{name}.md")
        assert f"`{balancer.__name__}`" in text
        table = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", text.partition("## Options")[2], re.M))
        parameters = inspect.signature(balancer).parameters
        assert list(table) == list(parameters), name
        for option, parameter in parameters.items():
            if parameter.default is not None:
                assert ast.literal_eval(table[option]) == parameter.default, f"{name}: {option}"


def test_the_coefficients_that_are_recommended_are_the_defaults():
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \| ([\d., ]+) \|", text_of("guide/choose.md"), re.M)
    assert len(rows) == 5
    for name, options, values in rows:
        parameters = inspect.signature(evenload.BALANCERS[name]).parameters
        for option, value in zip(re.findall(r"\w+", options), values.split(", "), strict=True):
            assert parameters[option].default == float(value), f"{name}: {option}"


@pytest.mark.parametrize("page", REFERENCE)
def test_everything_public_is_explained(page):
    package = f"evenload.{REFERENCE[page]}"
    assert f"::: {package}\n" in text_of(page)
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
            assert own, f"{package}.{name} has no docstring"


def test_the_questions_cover_every_row_of_the_conformance_suite():
    from evenload.balancers.conformance import ROWS

    held = {
        int(number)
        for numbers in re.findall(r"\(rows? ([\d and]+):", text_of("faq.md"))
        for number in re.findall(r"\d+", numbers)
    }
    assert held == {row.number for row in ROWS}
