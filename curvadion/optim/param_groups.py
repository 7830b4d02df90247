"""Parameter groups from a model: which parameters Dion treats as matrices."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from curvadion import checks
from curvadion.layout.parameters import global_shape
from curvadion.update import hyperparameters as check

# Kinds of parameters, by the module that owns them.
KINDS = ("matrix", "stack", "embedding", "head", "vector")
# Learning rates of the kinds that take AdamW or Lion (benchmarks/routing_rates.py).
RATES = {
    "adamw": {"embedding": 1e-2, "head": 3e-3, "vector": 1e-2},
    "lion": {"embedding": 3e-3, "head": 1e-3, "vector": 3e-3},
}
# Modules other than nn.Linear whose 2-D weights are matrices, (in, out): transformers' GPT-2.
INPUT_FIRST_MODULES = ("Conv1D",)
# Parts of names that wrappers add: FSDP1, activation checkpointing, torch.compile.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HEAD_NAMES = ("lm_head", "head", "output", "embed_out", "score", "classifier", "output_projection")
# Matrices as narrow as LoRA's take full rank, which costs little if one side is so small.
SKINNY_SIDES, SKINNY_RATIO = range(4, 65), 8
# Tensors that may be matrices have this many elements, or this share of all.
LARGE, LARGE_SHARE, LEAST_SIDE = 2**16, 0.01, 16


def param_groups(
    model: nn.Module,
    *,
    elementwise: Literal["adamw", "lion"] = "adamw",
    elementwise_lr: float | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    patterns: Mapping[str, str | Mapping[str, Any]] | None = None,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Group a model's parameters by kind, for CurvaDion and Dion.

    Kinds, by module type and name:
        "matrix": 2-D weights of linear layers; algorithm "dion". The weights of transformers'
            Conv1D have ``input_first``.
        "stack": 3-D weights (E, m, n) of E experts, which are E matrices; algorithm "dion",
            ``stack_dims=1``. Recognised are a module's ``gate_up_proj`` and ``down_proj``
            (transformers' Mixtral, Qwen3-MoE, Llama 4 and others), with ``input_first`` where
            needed.
        "embedding": weights of nn.Embedding and nn.EmbeddingBag.
        "head": weights tied to an embedding, and those of a linear layer that is named like an
            output head or has as many outputs as an embedding has entries.
        "vector": everything else: norms, biases, convolutions, bare parameters.

    "matrix" and "stack" use the optimizer's ``lr``. The other kinds use ``elementwise`` without
    weight decay, at these learning rates: 0.01 for AdamW (0.003 for a head), 0.003 for Lion (0.001
    for a head). If you lower ``lr``, lower ``elementwise_lr`` as well.

    Skinny matrices such as LoRA's, with one side of 4 to 64 and the other at least 8 times as long,
    get ``rank_fraction=1.0``: a quarter of rank 8 would be 2. A ``rank_fraction`` in ``options``
    applies to all matrices of the kind, including skinny ones.

    Args:
        model: the module to optimize.
        elementwise: "adamw" or "lion", for all parameters that are not matrices.
        elementwise_lr: one learning rate for all of these, instead of those above.
        options: group keys by kind, which override all of the above, e.g.
            ``{"head": {"lr": 1e-3}}``.
        patterns: maps shell-style patterns of parameter names to kinds, e.g.
            ``{"*.router.weight": "vector"}``, or to a kind and further group keys:
            ``{"*.c_attn.weight": {"kind": "matrix", "row_blocks": 3}}``. The first match wins.
        verbose: print each parameter's group, with the groups' keys.

    Returns:
        Groups whose ``params`` are (name, parameter) pairs; frozen parameters are left out, shared
        ones appear once.

    Raises:
        TypeError: if ``model`` is not a module, or options of a kind are not a dict.
        ValueError: for unknown kinds, patterns that match nothing or a wrong shape, undeclared flat
            weights, or a model without trainable parameters.

    Warns:
        UserWarning: names large tensors that use ``elementwise`` although they may be matrices, and
            embeddings and heads if, without patterns, no matrix is left for Dion.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.one_of("elementwise", elementwise, tuple(RATES))
    rates: Mapping[str, float] = RATES[elementwise]
    if elementwise_lr is not None:
        check.learning_rate("elementwise_lr", elementwise_lr)
        rates = dict.fromkeys(rates, elementwise_lr)
    options = options or {}
    for kind, keys in options.items():
        _check_kind("options", kind)
        _check_keys(f"options[{kind!r}]", keys)
    rules = {pattern: _rule(pattern, wanted) for pattern, wanted in (patterns or {}).items()}

    routed = [_routed(parameter, rules) for parameter in _kinds(model)]
    if unmatched := rules.keys() - {parameter.pattern for parameter in routed}:
        raise ValueError(
            f"patterns {sorted(unmatched)} match no trainable parameter (or only ones that an "
            f"earlier pattern matched); parameter names look like "
            f"{[parameter.name for parameter in routed][:4]}"
        )
    if not routed:
        raise ValueError("model has no trainable parameters: nothing to optimize")
    _warn_of_large(routed, elementwise)
    if not patterns:
        _warn_without_matrices(routed, elementwise)

    groups: list[dict[str, Any]] = []
    for kind in KINDS:
        defaults: dict[str, Any] = {"algorithm": "dion"}
        if kind in rates:
            defaults = {"algorithm": elementwise, "lr": rates[kind], "weight_decay": 0.0}
        elif kind == "stack":
            defaults["stack_dims"] = 1
        of_kind = [parameter for parameter in routed if parameter.kind == kind]
        for group in _groups(of_kind, defaults, options.get(kind, {})):
            groups.append(group)
            if verbose:
                print(_described(kind, group))
    return groups


def _groups(
    members: Sequence[_Parameter], defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Group one kind's parameters by their keys; those without individual keys come first."""
    groups: list[tuple[dict[str, Any], list[tuple[str, Tensor]]]] = []
    for p in sorted(members, key=lambda p: bool(p.stored or p.given)):
        keys = {**defaults, **p.stored, **options, **p.given}
        params = next((params for known, params in groups if known == keys), None)
        if params is None:
            params = []
            groups.append((keys, params))
        params.append((p.name, p.X))
    return [{"params": params, **keys} for keys, params in groups]


def _described(kind: str, group: Mapping[str, Any]) -> str:
    """Return one line for the group and one for each parameter."""
    settings = ", ".join(f"{k}={v}" for k, v in group.items() if k != "params")
    params = [(name, global_shape(X)) for name, X in group["params"]]
    count = sum(math.prod(shape) for _, shape in params)
    first = f"{kind}: {settings}: {len(params)} parameters, {count:,} elements"
    return "\n".join([first, *(f"  {name} {shape}" for name, shape in params)])


@dataclass(frozen=True)
class _Parameter:
    """A trainable parameter with its kind and keys."""

    name: str
    X: Tensor
    kind: str
    stored: dict[str, Any] = field(default_factory=dict)  # group keys for the storage of matrices
    given: Mapping[str, Any] = field(default_factory=dict)  # group keys of the matching pattern
    pattern: str | None = None
    unknown: bool = False  # a vector because no rule matched

    @property
    def shape(self) -> tuple[int, ...]:
        return global_shape(self.X)


def _rule(pattern: str, wanted: object) -> tuple[str, dict[str, Any]]:
    """The kind and the group keys of a user's pattern."""
    name = f"patterns[{pattern!r}]"
    keys: dict[str, Any] = dict(wanted) if isinstance(wanted, Mapping) else {"kind": wanted}
    if "kind" not in keys:
        raise ValueError(f"{name}={wanted!r} has no 'kind': it must be one of {KINDS}")
    kind: Any = keys.pop("kind")
    _check_kind("patterns", kind)
    _check_keys(name, keys)
    return kind, keys


def _check_kind(argument: str, kind: object) -> None:
    if kind not in KINDS:
        raise ValueError(f"{argument} has the unknown kind {kind!r}: it must be one of {KINDS}")


def _check_keys(name: str, keys: object) -> None:
    if not isinstance(keys, Mapping):
        raise TypeError(f"{name}={keys!r} must be a dict of group keys")
    if taken := {"params", "param_names"} & set(keys):
        raise ValueError(
            f"{name} must not have the keys {sorted(taken)}: the model provides the parameters"
        )


def _routed(
    parameter: _Parameter, rules: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> _Parameter:
    """Apply the first pattern that matches the parameter's name, and the options of its kind."""
    pattern = next((p for p in rules if fnmatchcase(parameter.name, p)), None)
    if pattern is not None:
        kind, keys = rules[pattern]
        parameter = replace(parameter, kind=kind, given=keys, pattern=pattern, unknown=False)
    dimensions = {"matrix": 2, "stack": 3}.get(parameter.kind)
    if dimensions is None:
        return replace(parameter, stored={})
    shape = parameter.shape
    if len(shape) < dimensions:
        raise ValueError(
            f"{parameter.name} of shape {shape} cannot be a {parameter.kind!r}, which has "
            f"{dimensions} dimensions or more"
        )
    m, n = shape[dimensions - 2], math.prod(shape[dimensions - 1 :])
    if min(m, n) in SKINNY_SIDES and max(m, n) >= SKINNY_RATIO * min(m, n):
        return replace(parameter, stored={**parameter.stored, "rank_fraction": 1.0})
    return parameter


def _kinds(model: nn.Module) -> Iterator[_Parameter]:
    """Yield every trainable parameter with its kind, shared ones once."""
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    # A position embedding is often as long as layers are wide, so it cannot identify a head.
    vocabularies = {m.num_embeddings for m in embeddings if m.num_embeddings != m.embedding_dim}
    embedded = {id(m.weight) for m in embeddings}
    linear_weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    seen: set[int] = set()
    for wrapped_prefix, module in model.named_modules():
        prefix = ".".join(part for part in wrapped_prefix.split(".") if part not in WRAPPERS)
        experts = _experts(module)
        input_first = type(module).__name__ in INPUT_FIRST_MODULES
        has_matrices = input_first or isinstance(module, (nn.Linear, nn.MultiheadAttention))
        has_vectors = isinstance(module, nn.modules.conv._ConvNd) or (
            type(module).__name__.endswith(("Norm", "Router"))
        )
        for local_name, X in module.named_parameters(recurse=False):
            if id(X) in seen or not X.requires_grad:
                continue
            seen.add(id(X))
            name = f"{prefix}.{local_name}" if prefix else local_name
            if id(X) in embedded | linear_weights and len(global_shape(X)) != 2:
                raise ValueError(
                    f"{name} of shape {tuple(X.shape)} is the weight of a "
                    f"{type(module).__name__}, but flat: with FullyShardedDataParallel call "
                    f"curvadion.integrations.fsdp.declare_flat_shards(model) first."
                )
            if id(X) in embedded:
                yield _Parameter(name, X, "head" if id(X) in linear_weights else "embedding")
            elif local_name in experts:
                yield _Parameter(name, X, "stack", experts[local_name])
            elif not has_matrices or len(global_shape(X)) != 2:
                known = has_vectors or local_name.endswith("bias")
                yield _Parameter(name, X, "vector", unknown=not known)
            elif _is_head(prefix, module, vocabularies):
                yield _Parameter(name, X, "head")
            else:
                yield _Parameter(name, X, "matrix", {"input_first": True} if input_first else {})


def _experts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Keys of a module's (E, 2i, h) ``gate_up_proj`` and (E, h, i) ``down_proj``, or transposes."""
    names = ("gate_up_proj", "down_proj")
    weights = [getattr(module, name, None) for name in names]
    shapes = [global_shape(X) for X in weights if isinstance(X, Tensor)]
    if [len(shape) for shape in shapes] != [3, 3]:
        return {}
    (E, *up), (E_down, *down) = shapes
    for input_first in (False, True):
        (hidden_twice, h), (h_down, hidden) = (up[::-1], down[::-1]) if input_first else (up, down)
        if (E, h) == (E_down, h_down) and hidden_twice == 2 * hidden:
            return dict.fromkeys(names, {"input_first": True} if input_first else {})
    return {}


def _is_head(prefix: str, module: nn.Module, vocabularies: set[int]) -> bool:
    """Whether a layer outside numbered blocks is named like a head or as wide as a vocabulary."""
    *parents, last = prefix.split(".")
    # In blocks a width may happen to equal the length of a position embedding.
    if any(part.isdigit() for part in parents):
        return False
    return last in HEAD_NAMES or getattr(module, "out_features", None) in vocabularies


def _warn_of_large(routed: Sequence[_Parameter], elementwise: str) -> None:
    """Warn about large tensors that may be matrices; those of numbered layers share a line."""
    total = sum(math.prod(p.shape) for p in routed)
    large = [p for p in routed if p.unknown and _may_be_matrices(p.shape, total)]
    if not large:
        return
    lines: dict[str, list[_Parameter]] = {}
    for p in large:
        lines.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", p.name), []).append(p)
    share = sum(math.prod(p.shape) for p in large) / total
    more = {p: f" and {len(these) - 1} more" * (len(these) > 1) for p, these in lines.items()}
    named = "; ".join(f"{p!r} of shape {these[0].shape}{more[p]}" for p, these in lines.items())
    pattern, these = next(iter(lines.items()))
    kind = "stack" if len(these[0].shape) > 2 else "matrix"
    warnings.warn(
        f"param_groups assigns {share:.0%} of the model's elements to {elementwise}, although they "
        f"may be matrices: {named}. To use Dion for them pass for example patterns={{{pattern!r}: "
        f"{kind!r}}}, or {{'kind': {kind!r}, 'input_first': True}} instead of {kind!r} if they are "
        f"stored as (..., in, out); to keep {elementwise} without this warning pass "
        f"patterns={{{pattern!r}: 'vector'}}.",
        stacklevel=checks.user_stacklevel(),
    )


def _warn_without_matrices(routed: Sequence[_Parameter], elementwise: str) -> None:
    """Warn if only embeddings and heads were found, although Dion was probably wanted."""
    tables = [p for p in routed if p.kind in ("embedding", "head")]
    if tables and not any(p.kind in ("matrix", "stack") for p in routed):
        warnings.warn(
            f"param_groups found no matrix for Dion, so all parameters use {elementwise}: "
            f"{', '.join(f'{p.name!r} counts as {p.kind!r}' for p in tables[:4])}. If one of them "
            f"is the weight of a hidden layer, pass for example patterns={{{tables[-1].name!r}: "
            f"'matrix'}}.",
            stacklevel=checks.user_stacklevel(),
        )


def _may_be_matrices(shape: tuple[int, ...], total: int) -> bool:
    """Whether a shape is large, without a leading dimension of one."""
    size = math.prod(shape)
    large = size >= LARGE or size >= LARGE_SHARE * total
    return large and len(shape) > 1 and shape[0] > 1 and min(shape[-2:]) >= LEAST_SIDE
