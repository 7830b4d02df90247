"""Command-line flags from a dataclass: each field is a flag with its default and help."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """Declare a dataclass field with a help text; a tuple default accepts several values."""
    return dataclasses.field(default=default, metadata={"help": help})


def parse(config: type[T], arguments: Sequence[str] | None = None) -> T:
    """Return an instance of the dataclass ``config`` from arguments, ``sys.argv`` by default.

    Fields may be bool (``--flag`` and ``--no-flag``), Literal (choices), ``tuple[X, ...]`` (several
    values), ``X | None`` (absent by default) or any type that parses a string.
    """
    parser = argparse.ArgumentParser(
        description=config.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    types_of = typing.get_type_hints(config)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=field.default,
            help=field.metadata["help"].replace("%", "%%"),  # argparse formats it
            **_reading(types_of[field.name]),
        )
    given = vars(parser.parse_args(arguments))
    return config(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def _reading(kind: Any) -> dict[str, Any]:
    """Return add_argument's keywords for a type."""
    arguments = typing.get_args(kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return {"choices": arguments}
    if typing.get_origin(kind) is tuple:
        return {**_reading(arguments[0]), "nargs": "*"}
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _reading(next(each for each in arguments if each is not type(None)))
    return {"type": kind}
