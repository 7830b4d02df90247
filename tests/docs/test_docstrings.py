"""Functions of four or more arguments explain each of them."""

from __future__ import annotations

import ast

import pytest

from support.documents.doc_blocks import ROOT

FOLDERS = ("curvadion", "kernels", "benchmarks", "examples")


def functions(folder):
    """Yield the place, the definition and whether it is a method, of every function."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        methods = {
            method
            for kind in ast.walk(tree)
            if isinstance(kind, ast.ClassDef)
            for method in kind.body
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node, node in methods


def missing(node, is_method):
    """Names of arguments that a docstring does not explain, of functions with four or more."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
    text = ast.get_docstring(node)
    # A class explains the arguments of __init__, and the method that is overridden those of one
    # without a docstring.
    if len(names) < 4 or node.name == "__init__" or (is_method and text is None):
        return []
    _, _, explained = (text or "").partition("Args:\n")
    return [name for name in names if f"\n    {name}: " not in "\n" + explained]


@pytest.mark.parametrize("folder", FOLDERS)
def test_arguments_are_explained(folder):
    found = list(functions(folder))
    assert found
    unexplained = {place: missing(*rest) for place, *rest in found}
    assert not {place: names for place, names in unexplained.items() if names}


def test_the_test_sees_what_is_missing():
    [node] = ast.parse("def f(a, b, c, d):\n    '''.\n\n    Args:\n        a: one.\n    '''").body
    assert missing(node, False) == ["b", "c", "d"]
