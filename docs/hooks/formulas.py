"""Turns the formulas of pages, LaTeX in ```` ```math ```` blocks, into MathML, which browsers set.

GitHub sets the same blocks with MathJax. The site needs no script for them.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.commands import MATRICES
from latex2mathml.converter import convert
from pymdownx.superfences import SuperFencesException

ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}")
ESCAPED = re.compile(r"\\.")


def on_config(config: Any, **_: Any) -> Any:
    """Let the Markdown extension for fenced blocks pass formulas to this module."""
    fence = {"name": "math", "class": "formula", "format": formula}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def formula(latex: str, *_: Any, **__: Any) -> str:
    """Return a block's formula as HTML.

    Raises:
        SuperFencesException: It cannot be read. After any other error the extension or the package
            would show the LaTeX as text.
    """
    try:
        return f'<div class="formula">{_mathml(latex)}</div>'
    except Exception as error:  # those of the package have no class in common
        what = " ".join([type(error).__name__, *map(str, error.args)])
        raise SuperFencesException(f"this formula cannot be read ({what}):\n{latex}") from error


def _mathml(latex: str) -> str:
    """Convert a formula; also refuse what the package would show as text, or on one line."""
    for name in ENVIRONMENT.findall(latex):
        if f"\\{name}" not in MATRICES:
            raise ValueError(f"unknown environment {name}")
    unescaped = ESCAPED.sub("", latex)
    if unescaped.count("{") != unescaped.count("}"):
        raise ValueError("braces do not match")
    mathml = convert(latex, display="block")
    for text in ElementTree.fromstring(mathml).itertext():  # an & outside of a table is no XML
        if "\\" in text:
            raise ValueError(f"unknown command {text}")
    return mathml
