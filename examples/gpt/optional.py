"""Imports that only some flags need."""

import importlib
from typing import Any


def need(module: str, purpose: str) -> Any:
    """Import a module; if it is missing, say what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {error.name or module}: pip install '.[train]' in the checkout"
        ) from error
