"""The keys of a parameter group: valid values, and errors."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from curvadion.checks import boolean, integer, number, one_of
from curvadion.layout.matrix import UPDATE_SCALES
from curvadion.plan.coded_states import CODED
from curvadion.plan.state import PROGRESS
from curvadion.sync.quantized_average import QuantizedAverage
from curvadion.update.registry import DIRECTIONS

# What users pass as parameters, as in torch.
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
DirectionName = Literal["low_rank", "polar", "normuon", "dion2", "nordion2"]


class GroupOptions(TypedDict, total=False):
    """Defaults of group keys, as keyword arguments of Dion and CurvaDion.

    :class:`curvadion.Dion` says what they mean, and ``DEFAULTS`` has those that are not given.
    None is the sync's default, or, for a dtype, the parameter's.
    """

    momentum: float
    look_ahead: float | None
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    direction: DirectionName | None
    rank_fraction: float | None
    rank_multiple_of: int
    stack_dims: int
    row_blocks: int | Sequence[int]
    column_blocks: int | Sequence[int]
    input_first: bool
    momentum_rule: Literal["error_feedback", "plain"]
    right_factor: Literal["column_normalized", "qr"] | None
    newton_schulz: Literal["polar_express", "muon"]
    newton_schulz_steps: int
    gather: Literal["auto", "never"]
    exchange_dtype: torch.dtype | str | None
    update_scale: Literal["spectral", "original", "match_rms_adamw"]
    state_dtype: torch.dtype | str | None
    q_dtype: torch.dtype | str | None
    stochastic_rounding: bool


DEFAULTS: GroupOptions = {
    "momentum": 0.95,
    "look_ahead": None,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "direction": None,
    "rank_fraction": None,
    "rank_multiple_of": 1,
    "stack_dims": 0,
    "row_blocks": 1,
    "column_blocks": 1,
    "input_first": False,
    "momentum_rule": "error_feedback",
    "right_factor": None,
    "newton_schulz": "polar_express",
    "newton_schulz_steps": 4,
    "gather": "auto",
    "exchange_dtype": None,
    "update_scale": "spectral",
    "state_dtype": None,
    "q_dtype": None,
    "stochastic_rounding": False,
}
LR_RATIO = "lr_ratio"  # of a new group only: its lr, as a multiple of the optimizer's
LARGEST_OPTION = 1e9  # more is a mistake, and may overflow float32
DTYPE_KEYS = ("state_dtype", "q_dtype", "exchange_dtype")
DTYPES = ("float64", "float32", "bfloat16")
STATE_DTYPES = (*DTYPES, CODED)

# Keys of torch.optim, its schedulers and frameworks, without effect here.
FOREIGN_KEYS = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "maximize"}
    | {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum", "name"}
)
# Names that other optimizers give to these keys.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "mu": "momentum",
    "nesterov": "look_ahead",
    "ns_steps": "newton_schulz_steps",
    "adjust_lr_fn": "update_scale",
}
# Keyword arguments of CurvaDion that Dion and Muon lack: they synchronise at every step.
OF_CURVADION = (
    "gate",
    "sync",
    "wire_budget",
    "threshold",
    "local_step",
    "local_lr",
    "max_local_steps",
    "warmup_steps",
)


def with_defaults(kind: type, options: Mapping[str, object]) -> dict[str, Any]:
    """Options of a constructor, completed by :data:`DEFAULTS`; TypeError for an unknown one.

    Args:
        kind: the class that is constructed.
        options: the keyword arguments that its signature does not name.
    """
    for key in options:
        if key not in DEFAULTS:
            raise TypeError(
                f"{kind.__name__} got an unexpected keyword argument {key!r}{_remedy(kind, key)}"
            )
    return {**DEFAULTS, **options}


def _remedy(kind: type, key: str) -> str:
    """What to write in place of an unknown argument of a constructor; "" if nobody knows."""
    if key in inspect.signature(QuantizedAverage).parameters:
        return f": pass sync=curvadion.QuantizedAverage({key}=...) to CurvaDion or Replicated"
    if key in OF_CURVADION:
        return f": CurvaDion has it, {kind.__name__} synchronises at every step"
    parameters = inspect.signature(kind).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    known += DEFAULTS
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    suggestion = _OTHER_NAMES.get(key) or (matches[0] if matches else None)
    return "" if suggestion is None else f": did you mean {suggestion!r}?"


def check_group(group: Mapping[Any, Any]) -> None:
    """Raise an error for an invalid value or a misspelt key."""
    for key in sorted(unknown_keys(group)):
        suggestion = _suggestion(key)
        if suggestion is not None:
            raise ValueError(
                f"Unknown group key {key}={group[key]!r}: did you mean {suggestion!r}?"
            )
    _check_values(group)


def _suggestion(key: str) -> str | None:
    """The key that a misspelt one stands for; None for a key of another tool."""
    if key in _OTHER_NAMES:
        return _OTHER_NAMES[key]
    matches = difflib.get_close_matches(key, _CHECKS, n=1, cutoff=0.75)
    if not matches:
        return None
    # A key that contains one of these, such as weight_decay_mult, is another tool's.
    is_longer_name = f"_{matches[0]}_" in f"_{key}_"
    return None if is_longer_name else matches[0]


def _check_values(group: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a value that a key cannot have."""
    if group.get("maximize"):
        raise ValueError(
            f"maximize={group['maximize']!r} is not supported: minimise the negated loss"
        )
    for key, check in _CHECKS.items():
        if key not in group:
            continue
        if isinstance(check, tuple):
            one_of(key, group[key], check)
        else:
            check(key, group[key])


def check_coded(group: Mapping[str, Any]) -> None:
    """Raise ValueError for states in 8 bits with settings that do not suit them."""
    if group["state_dtype"] != CODED:
        return
    if group["algorithm"] == "adamw" and group["eps"] < LEAST_EPS_OF_CODES:
        raise ValueError(
            f"eps={group['eps']!r} with state_dtype={CODED!r}: second moments of very small "
            f"gradients are zero in 8 bits, so use {LEAST_EPS_OF_CODES:g} at least"
        )
    if group["algorithm"] != "dion":
        return
    name = group["direction"]
    if not DIRECTIONS[name].opens_momenta:
        able = sorted(name for name, one in DIRECTIONS.items() if one.opens_momenta)
        raise ValueError(
            f"state_dtype={CODED!r} with direction={name!r}: momenta in 8 bits need one of {able}"
        )


def with_direction(group: Mapping[str, Any]) -> dict[str, Any]:
    """Add direction="low_rank" to a group with a rank_fraction below 1 and no direction."""
    if group.get("direction") is None and group.get("rank_fraction") not in (None, 1):
        return {**group, "direction": "low_rank"}
    return dict(group)


def with_rate(group: Mapping[str, Any], lr: float | Tensor) -> dict[str, Any]:
    """Turn the lr_ratio of a new group, if it has one, into its lr; a given lr wins.

    Args:
        group: as users give it.
        lr: the optimizer's.
    """
    resolved = dict(group)
    ratio = resolved.pop(LR_RATIO, None)
    if ratio is not None:
        resolved.setdefault("lr", ratio * lr)
    return resolved


def unknown_keys(group: Mapping[str, Any]) -> set[str]:
    """The keys of a group that neither this package nor torch or its schedulers know."""
    return group.keys() - _CHECKS.keys() - FOREIGN_KEYS - {PROGRESS}


def first_error(param_groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The error in the current groups, which users may have changed, if any."""
    for g, group in enumerate(param_groups):
        missing = sorted(SETTINGS - group.keys())
        if missing:
            return f"param_groups[{g}]: the key {missing[0]!r} is missing"
        if LR_RATIO in group:
            return (
                f"param_groups[{g}]: {LR_RATIO}={group[LR_RATIO]!r} has no effect once the "
                f"optimizer has the group: set its lr"
            )
        try:
            _check_values(group)
            check_coded(group)
        except (TypeError, ValueError) as error:
            return f"param_groups[{g}]: {error}"
    return None


def dtype_name(key: str, value: Any, known: Sequence[str] = DTYPES) -> str | None:
    """The name of a known dtype, given as torch.dtype or by name; None stays None."""
    name: str | None = value
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
    if name is not None and name not in known:
        raise ValueError(f"{key}={value!r} must be one of {known} or None, the default")
    return name


def learning_rate(key: str, value: object) -> None:
    """Raise unless it is a number >= 0 or a one-element tensor (read on a CPU only)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{key} must have one element, not shape {tuple(value.shape)}")
        if value.device.type != "cpu":
            return  # reading it would wait for the device
        value = value.item()
    number(key, value, most=LARGEST_OPTION)


def betas(key: str, value: object) -> None:
    """Raise unless it is a pair of numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{key}={value!r} must be a pair of numbers in [0, 1)")
    for i, beta in enumerate(value):
        number(f"{key}[{i}]", beta, below=1.0)


def _blocks(key: str, value: object) -> None:
    sizes = value if isinstance(value, (list, tuple)) else [value]
    for size in sizes:
        integer(key, size, 1)


# By key: the values it may have, or a function of key and value that raises an error.
_CHECKS: dict[str, tuple[object, ...] | Callable[[str, Any], object]] = {
    "algorithm": ("dion", "adamw", "lion"),
    "lr": learning_rate,
    LR_RATIO: lambda k, v: number(k, v, most=LARGEST_OPTION),
    "local_lr": lambda k, v: None if v is None else learning_rate(k, v),
    "momentum": lambda k, v: number(k, v, below=1.0),
    "look_ahead": lambda k, v: number(k, v, most=LARGEST_OPTION),
    "betas": betas,
    "eps": number,
    "weight_decay": lambda k, v: number(k, v, most=LARGEST_OPTION),
    # Ranks follow from nine decimals.
    "rank_fraction": lambda k, v: number(k, v, least=1e-9, most=1.0),
    "rank_multiple_of": lambda k, v: integer(k, v, 1),
    "stack_dims": lambda k, v: integer(k, v, 0),
    "row_blocks": _blocks,
    "column_blocks": _blocks,
    "input_first": boolean,
    "direction": lambda k, v: one_of(k, v, tuple(DIRECTIONS)),
    "newton_schulz": ("polar_express", "muon"),
    "newton_schulz_steps": lambda k, v: integer(k, v, 1, 20),
    "gather": ("auto", "never"),
    "exchange_dtype": lambda k, v: dtype_name(k, v, ("float32", "bfloat16")),
    "update_scale": tuple(UPDATE_SCALES),
    "momentum_rule": ("error_feedback", "plain"),
    "right_factor": ("column_normalized", "qr"),
    "state_dtype": lambda k, v: dtype_name(k, v, STATE_DTYPES),
    "q_dtype": dtype_name,
    "stochastic_rounding": boolean,
}
# Codes of the roots of second moments are zero where all gradients of a block stay below 1e-17.
# The step m / (sqrt(v) + eps) is then small only if eps is larger than these.
LEAST_EPS_OF_CODES = 1e-16
# The keys that every group of an optimizer has.
SETTINGS = _CHECKS.keys() - {LR_RATIO}
# The settings that AdamW and Lion read. Below: the directions that do not read betas and eps.
_OF_ELEMENTWISE = {
    "adamw": {"algorithm", "lr", "betas", "eps", "weight_decay", "state_dtype"},
    "lion": {"algorithm", "lr", "betas", "weight_decay", "state_dtype"},
}
_WITHOUT_SQUARES = ("low_rank", "polar", "dion2")


def without_effect(group: Mapping[str, Any]) -> set[str]:
    """The settings of a group that its updates do not read."""
    algorithm = group.get("algorithm")
    if algorithm in _OF_ELEMENTWISE:
        return SETTINGS - _OF_ELEMENTWISE[algorithm]
    if algorithm == "dion" and group.get("direction") in _WITHOUT_SQUARES:
        return {"betas", "eps"}
    return set()
