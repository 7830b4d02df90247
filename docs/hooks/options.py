"""Spells out ``**options: Unpack[GroupOptions]`` in signatures, for mkdocstrings.

A page then shows each keyword with its type and default.
"""

from __future__ import annotations

from typing import Any

import griffe

GROUP_KEYS = "curvadion.optim.group_keys"


class Options(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """A dictionary of options becomes its keyword arguments."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Replace the dictionary in the signature of what was loaded."""
        if all(str(p.annotation) != "Unpack[GroupOptions]" for p in func.parameters):
            return
        del func.parameters["options"]
        module = func.modules_collection[GROUP_KEYS]
        given = module["DEFAULTS"].value
        defaults = dict(zip(map(str, given.keys), given.values, strict=True))
        for name, attribute in module["GroupOptions"].attributes.items():
            parameter = griffe.Parameter(
                name,
                annotation=attribute.annotation,
                kind=griffe.ParameterKind.keyword_only,
                default=defaults[repr(name)],
            )
            func.parameters.add(parameter)
