"""Turns Sphinx's roles, literal blocks and tables in docstrings into Markdown, for mkdocstrings."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")
LITERAL = re.compile(r"::$", re.MULTILINE)
TABLE = re.compile(r"^=+(?: +=+)+\n(?:.+\n)+?=+(?: +=+)+\n(?:.+\n)+?=+(?: +=+)+$", re.MULTILINE)


class Roles(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """A role becomes a link where the site documents what it names, else code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of what was loaded."""
        if obj.docstring is None:
            return
        owner = obj if obj.is_class else obj.parent

        def link(role: re.Match[str]) -> str:
            name = role[1]
            target = name if name.startswith("curvadion.") else f"{owner.path}.{name}"
            shown = name.rpartition(".")[2]
            return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'

        text = LITERAL.sub(":", ROLE.sub(link, obj.docstring.value))
        obj.docstring.value = TABLE.sub(lambda table: textwrap.indent(table[0], "    "), text)
