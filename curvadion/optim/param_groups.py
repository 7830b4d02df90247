"""Parameter groups from a model: which parameters Dion treats as matrices."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from curvadion import checks
from curvadion.layout.placements import global_shape
from curvadion.optim import group_keys

# Kinds of parameters, by the module that owns them.
KINDS = ("matrix", "stack", "embedding", "head", "vector")
# Learning rates of the kinds that take AdamW or Lion, as multiples of the optimizer's. At its
# default, 0.02, they are those that benchmarks/losses/elementwise_rates.py found.
LR_RATIOS = {
    "adamw": {"embedding": 0.5, "head": 0.15, "vector": 0.5},
    "lion": {"embedding": 0.15, "head": 0.05, "vector": 0.15},
}
# Modules whose 2-D weights are matrices (in, out): transformers' GPT-2.
INPUT_FIRST_MODULES = ("Conv1D",)
# Parts of names that wrappers add: FSDP1, activation checkpointing, torch.compile.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HEAD_NAMES = "lm_head head output output_projection embed_out score classifier".split()
# Matrices as narrow as LoRA's take full rank, which costs little there. Their shorter side is
# one of these, and the longer one at least so many times as long.
SKINNY_SIDES = range(4, 65)
SKINNY_RATIO = 8
# Tensors that may be matrices have this many elements, or this share of the model's, and both
# sides of a matrix are at least so long.
LARGE = 2**16
LARGE_SHARE = 0.01
LEAST_SIDE = 16


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
        "matrix": 2-D weights of linear layers and of transformers' Conv1D (``input_first``).
        "stack": ``gate_up_proj`` and ``down_proj`` of transformers' experts, E matrices
            (E, m, n); ``stack_dims=1``, with ``input_first`` where needed.
        "embedding": weights of nn.Embedding and nn.EmbeddingBag.
        "head": weights tied to an embedding, and of a linear layer that is named like an
            output head or has as many outputs as an embedding has entries.
        "vector": everything else: norms, biases, convolutions, bare parameters.

    "matrix" and "stack" have algorithm "dion" and the optimizer's ``lr``. The others have
    ``elementwise`` without weight decay, and an ``lr_ratio``: their ``lr`` is this multiple
    of the optimizer's, 0.5 for AdamW (heads 0.15) or 0.15 for Lion (heads 0.05).

    Matrices such as LoRA's, with one side of 4 to 64 and the other at least 8 times as long,
    get ``rank_fraction=1.0`` unless ``options`` set one: a quarter of rank 8 would be 2.

    Args:
        model: the module to optimize.
        elementwise: "adamw" or "lion", for all parameters that are not matrices.
        elementwise_lr: one learning rate for all of these, whatever the optimizer's.
        options: group keys by kind, which override those above: ``{"head": {"lr": 1e-3}}``
            or ``{"head": {"lr_ratio": 0.1}}``.
        patterns: maps shell-style patterns of names to a kind, or to a kind and group keys;
            the first match wins:
            ``{"*.c_attn.weight": {"kind": "matrix", "row_blocks": 3}}``.
        verbose: print each group with the names of its parameters.

    Returns:
        Groups of (name, parameter) pairs, without frozen parameters; shared ones appear once.

    Raises:
        TypeError, ValueError: for wrong arguments, patterns that match nothing or a wrong
            shape, undeclared flat weights, or a model without trainable parameters.

    Warns:
        UserWarning: if large tensors with ``elementwise`` may be matrices.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.one_of("elementwise", elementwise, tuple(LR_RATIOS))
    ratios = LR_RATIOS[elementwise]
    if elementwise_lr is not None:
        group_keys.learning_rate("elementwise_lr", elementwise_lr)
    options = options or {}
    for kind, keys in options.items():
        _check("options", kind, keys)
    rules: dict[str, tuple[str, dict[str, Any]]] = {}
    for pattern, value in (patterns or {}).items():
        rules[pattern] = _rule(pattern, value)

    parameters = list(_parameters(model))
    if not parameters:
        raise ValueError(
            f"model={type(model).__name__} has no trainable parameters: set "
            f"requires_grad=True on those to optimize."
        )
    matched = {_route(p, rules) for p in parameters}
    unmatched = rules.keys() - matched
    if unmatched:
        raise ValueError(
            f"patterns {sorted(unmatched)} match no trainable parameter, or only those of "
            f"earlier patterns: remove or mend them; names look like "
            f"{[p.name for p in parameters][:4]}"
        )
    _warn_of_large(parameters, elementwise)

    groups: list[dict[str, Any]] = []
    for kind in KINDS:
        defaults: dict[str, Any] = {"algorithm": "dion"}
        if kind in ratios:
            defaults = {"algorithm": elementwise, "weight_decay": 0.0}
            if elementwise_lr is None:
                defaults[group_keys.LR_RATIO] = ratios[kind]
            else:
                defaults["lr"] = elementwise_lr
        elif kind == "stack":
            defaults["stack_dims"] = 1
        of_kind = [p for p in parameters if p.kind == kind]
        groups += _groups(of_kind, defaults, options.get(kind, {}))
    if verbose:
        for group in groups:
            print({**group, "params": [name for name, _ in group["params"]]})
    return groups


@dataclass
class _Parameter:
    """A trainable parameter, its kind, and group keys.

    Args:
        name: in the model, without the wrappers' parts.
        X: the parameter.
        kind: one of :data:`KINDS`.
        matrix_keys: group keys that follow from how matrices are stored, and their shape.
        pattern_keys: group keys of the pattern that matches.
        is_known: whether a rule or a pattern has chosen the kind.
    """

    name: str
    X: Tensor
    kind: str
    matrix_keys: dict[str, Any] = field(default_factory=dict)
    pattern_keys: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return global_shape(self.X)


def _groups(
    members: Sequence[_Parameter], defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Group one kind's parameters by their keys.

    Args:
        members: the parameters of the kind.
        defaults: group keys of the kind.
        options: the user's group keys for the kind.

    Returns:
        Groups, first that of the parameters without keys of their own.
    """
    groups: dict[str, dict[str, Any]] = {}
    for p in sorted(members, key=lambda p: bool(p.matrix_keys or p.pattern_keys)):
        keys = _overridden({**defaults, **p.matrix_keys}, options, p.pattern_keys)
        # Values need not be hashable, so their text tells groups apart.
        group = groups.setdefault(repr(sorted(keys.items())), {**keys, "params": []})
        group["params"].append((p.name, p.X))
    return list(groups.values())


def _overridden(keys: Mapping[str, Any], *later: Mapping[str, Any]) -> dict[str, Any]:
    """Group keys, overridden by later ones; a later rate replaces one that is given otherwise."""
    result = dict(keys)
    for layer in later:
        if "lr" in layer:
            result.pop(group_keys.LR_RATIO, None)
        elif group_keys.LR_RATIO in layer:
            result.pop("lr", None)
        result.update(layer)
    return result


def _rule(pattern: str, value: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind and the group keys of a user's pattern."""
    keys = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = keys.pop("kind", None)
    _check(f"patterns[{pattern!r}]", kind, keys)
    return str(kind), keys


def _check(argument: str, kind: object, keys: object) -> None:
    """Raise an error unless ``kind`` is a kind and ``keys`` are a dictionary."""
    if kind not in KINDS:
        raise ValueError(f"{argument} has the unknown kind {kind!r}: it must be one of {KINDS}")
    if not isinstance(keys, Mapping):
        raise TypeError(f"{argument}[{kind!r}]={keys!r} must be a dict of group keys")


def _route(p: _Parameter, rules: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str | None:
    """Apply the first pattern that matches a parameter's name; find keys by its shape.

    Returns:
        The pattern; None if none matches.
    """
    matches = (pattern for pattern in rules if fnmatchcase(p.name, pattern))
    pattern = next(matches, None)
    if pattern is not None:
        p.kind, p.pattern_keys = rules[pattern]
        p.is_known = True
    dimensions = {"matrix": 2, "stack": 3}.get(p.kind)
    if dimensions is None:
        p.matrix_keys = {}
        return pattern
    if len(p.shape) < dimensions:
        raise ValueError(
            f"{p.name} of shape {p.shape} cannot be a {p.kind!r}: it needs at least "
            f"{dimensions} dimensions. Choose another kind for it in patterns=."
        )
    # The sides of one matrix; dimensions beyond are flattened into columns.
    m = p.shape[dimensions - 2]
    n = math.prod(p.shape[dimensions - 1 :])
    if min(m, n) in SKINNY_SIDES and max(m, n) >= SKINNY_RATIO * min(m, n):
        p.matrix_keys["rank_fraction"] = 1.0
    return pattern


def _parameters(model: nn.Module) -> Iterator[_Parameter]:
    """Yield every trainable parameter with its kind, shared ones once."""
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    # Layers with as many outputs are heads. An embedding that is as long as layers are wide,
    # such as one of positions, would make heads of all of them.
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
                # Elsewhere a large tensor may be a matrix of a module without a rule.
                known = has_vectors or local_name.endswith("bias")
                yield _Parameter(name, X, "vector", is_known=known)
            elif _is_head(prefix, module, vocabularies):
                yield _Parameter(name, X, "head")
            else:
                yield _Parameter(name, X, "matrix", _storage_keys(input_first))


def _storage_keys(input_first: bool) -> dict[str, Any]:
    """Group keys of matrices that are stored as (in, out), or as (out, in)."""
    return {"input_first": True} if input_first else {}


def _experts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Group keys of a module's ``gate_up_proj`` and ``down_proj``, if they are experts.

    E experts of input size h and inner size i have gate_up_proj (E, 2i, h) and down_proj
    (E, h, i), or their transposes (E, h, 2i) and (E, i, h).

    Returns:
        Group keys by the weights' names; {} for other modules.
    """
    names = ("gate_up_proj", "down_proj")
    weights = [getattr(module, name, None) for name in names]
    shapes = [global_shape(X) for X in weights if isinstance(X, Tensor)]
    if [len(shape) for shape in shapes] != [3, 3]:
        return {}
    up_experts, *up = shapes[0]
    down_experts, *down = shapes[1]
    if up_experts != down_experts:
        return {}
    for input_first in (False, True):
        inner_twice, h = reversed(up) if input_first else up
        h_down, inner = reversed(down) if input_first else down
        if h == h_down and inner_twice == 2 * inner:
            return {name: _storage_keys(input_first) for name in names}
    return {}


def _is_head(prefix: str, module: nn.Module, vocabularies: set[int]) -> bool:
    """Whether a layer outside numbered blocks looks like a head."""
    *parents, last = prefix.split(".")
    if any(part.isdigit() for part in parents):
        return False
    return last in HEAD_NAMES or getattr(module, "out_features", None) in vocabularies


def _warn_of_large(parameters: Sequence[_Parameter], elementwise: str) -> None:
    """Warn about large tensors that no rule knows: they may be matrices."""
    least = min(LARGE, LARGE_SHARE * sum(math.prod(p.shape) for p in parameters))
    large = [p for p in parameters if not p.is_known and _may_be_matrices(p.shape, least)]
    if not large:
        return
    example = large[0]
    pattern = re.sub(r"\b\d+\b", "*", example.name)  # of all layers
    kind = "stack" if len(example.shape) > 2 else "matrix"
    warnings.warn(
        f"param_groups assigns to {elementwise} {len(large)} tensors that may be matrices, "
        f"such as {example.name!r} of shape {example.shape}. For Dion pass e.g. "
        f"patterns={{{pattern!r}: {kind!r}}}, with 'input_first': True if stored as "
        f"(..., in, out); 'vector' keeps {elementwise}.",
        stacklevel=checks.user_stacklevel(),
    )


def _may_be_matrices(shape: tuple[int, ...], least: float) -> bool:
    """Whether a shape has at least so many elements, in matrices that are not narrow.

    A leading dimension of one is for broadcasting, as in position embeddings of (1, length,
    width).
    """
    if len(shape) < 2 or math.prod(shape) < least:
        return False
    return shape[0] > 1 and min(shape[-2:]) >= LEAST_SIDE
