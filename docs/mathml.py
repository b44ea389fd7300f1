"""Equations become MathML while the site is built: browsers show it without a script, and nothing is fetched.

pymdownx.arithmatex leaves an equation as <span class="arithmatex">\\(...\\)</span> within a line, and as
<div class="arithmatex">\\[...\\]</div> on lines of its own.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    return EQUATION.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    tag, latex = found.groups()
    mathml = convert(html.unescape(latex.strip()), display="block" if tag == "div" else "inline")
    return f'<{tag} class="equation">{mathml}</{tag}>'
