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
# Learning rates of the kinds that take AdamW or Lion (benchmarks/routing_rates.py).
RATES = {
    "adamw": {"embedding": 1e-2, "head": 3e-3, "vector": 1e-2},
    "lion": {"embedding": 3e-3, "head": 1e-3, "vector": 3e-3},
}
# Modules whose 2-D weights are matrices (in, out): transformers' GPT-2.
INPUT_FIRST_MODULES = ("Conv1D",)
# Parts of names that wrappers add: FSDP1, activation checkpointing, torch.compile.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HEAD_NAMES = "lm_head head output output_projection embed_out score classifier".split()
# Matrices as narrow as LoRA's take full rank, which costs little there.
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
        "matrix": 2-D weights of linear layers and of transformers' Conv1D (``input_first``).
        "stack": ``gate_up_proj`` and ``down_proj`` of transformers' experts, E matrices
            (E, m, n); ``stack_dims=1``, with ``input_first`` where needed.
        "embedding": weights of nn.Embedding and nn.EmbeddingBag.
        "head": weights tied to an embedding, and of a linear layer that is named like an
            output head or has as many outputs as an embedding has entries.
        "vector": everything else: norms, biases, convolutions, bare parameters.

    "matrix" and "stack" have algorithm "dion" and the optimizer's ``lr``. The others have
    ``elementwise`` without weight decay, at 0.01 for AdamW (heads 0.003) or 0.003 for Lion
    (heads 0.001). If you lower ``lr``, lower ``elementwise_lr`` as well.

    Matrices such as LoRA's, with one side of 4 to 64 and the other at least 8 times as long,
    get ``rank_fraction=1.0`` unless ``options`` set one: a quarter of rank 8 would be 2.

    Args:
        model: the module to optimize.
        elementwise: "adamw" or "lion", for all parameters that are not matrices.
        elementwise_lr: one learning rate for all of these, instead of those above.
        options: group keys by kind, which override those above: ``{"head": {"lr": 1e-3}}``.
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
    checks.one_of("elementwise", elementwise, tuple(RATES))
    rates: Mapping[str, float] = RATES[elementwise]
    if elementwise_lr is not None:
        group_keys.learning_rate("elementwise_lr", elementwise_lr)
        rates = dict.fromkeys(rates, elementwise_lr)
    options = options or {}
    for kind, keys in options.items():
        _check("options", kind, keys)
    rules = {pattern: _rule(pattern, wanted) for pattern, wanted in (patterns or {}).items()}

    parameters = list(_parameters(model))
    if not parameters:
        raise ValueError("model has no trainable parameters: nothing to optimize")
    matched = [_route(p, rules) for p in parameters]
    if unmatched := rules.keys() - set(matched):
        raise ValueError(
            f"patterns {sorted(unmatched)} match no trainable parameter, or only those of "
            f"earlier patterns; names look like {[p.name for p in parameters][:4]}"
        )
    _warn_of_large(parameters, elementwise)

    groups: list[dict[str, Any]] = []
    for kind in KINDS:
        defaults: dict[str, Any] = {"algorithm": "dion"}
        if kind in rates:
            defaults = {"algorithm": elementwise, "lr": rates[kind], "weight_decay": 0.0}
        elif kind == "stack":
            defaults["stack_dims"] = 1
        of_kind = [p for p in parameters if p.kind == kind]
        groups += _groups(of_kind, defaults, options.get(kind, {}))
    for group in groups if verbose else ():
        print({**group, "params": [name for name, _ in group["params"]]})
    return groups


@dataclass
class _Parameter:
    """A trainable parameter, its kind, and group keys."""

    name: str
    X: Tensor
    kind: str
    stored: dict[str, Any] = field(default_factory=dict)  # keys for the storage of matrices
    given: Mapping[str, Any] = field(default_factory=dict)  # keys of the matching pattern
    known: bool = True  # whether a rule or a pattern has chosen the kind

    @property
    def shape(self) -> tuple[int, ...]:
        return global_shape(self.X)


def _groups(
    members: Sequence[_Parameter], defaults: Mapping[str, Any], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Group one kind's parameters by keys; those without keys of their own come first."""
    groups: dict[str, dict[str, Any]] = {}
    for p in sorted(members, key=lambda p: bool(p.stored or p.given)):
        keys = {**defaults, **p.stored, **options, **p.given}
        group = groups.setdefault(repr(sorted(keys.items())), {**keys, "params": []})
        group["params"].append((p.name, p.X))
    return list(groups.values())


def _rule(pattern: str, wanted: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind and the group keys of a user's pattern."""
    keys = dict(wanted) if isinstance(wanted, Mapping) else {"kind": wanted}
    kind = keys.pop("kind", None)
    _check(f"patterns[{pattern!r}]", kind, keys)
    return str(kind), keys


def _check(argument: str, kind: object, keys: object) -> None:
    if kind not in KINDS:
        raise ValueError(f"{argument} has the unknown kind {kind!r}: it must be one of {KINDS}")
    if not isinstance(keys, Mapping):
        raise TypeError(f"{argument}[{kind!r}]={keys!r} must be a dict of group keys")


def _route(p: _Parameter, rules: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str | None:
    """Apply the first pattern that matches the parameter's name, and return it."""
    pattern = next((each for each in rules if fnmatchcase(p.name, each)), None)
    if pattern is not None:
        p.kind, p.given = rules[pattern]
        p.known = True
    dimensions = {"matrix": 2, "stack": 3}.get(p.kind)
    if dimensions is None:
        p.stored = {}
        return pattern
    if len(p.shape) < dimensions:
        raise ValueError(
            f"{p.name} of shape {p.shape} cannot be a {p.kind!r}: it needs at least "
            f"{dimensions} dimensions"
        )
    m, n = p.shape[dimensions - 2], math.prod(p.shape[dimensions - 1 :])
    if min(m, n) in SKINNY_SIDES and max(m, n) >= SKINNY_RATIO * min(m, n):
        p.stored["rank_fraction"] = 1.0
    return pattern


def _parameters(model: nn.Module) -> Iterator[_Parameter]:
    """Yield every trainable parameter with its kind, shared ones once."""
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    # A position embedding may be as long as layers are wide.
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
                yield _Parameter(name, X, "vector", known=known)
            elif _is_head(prefix, module, vocabularies):
                yield _Parameter(name, X, "head")
            else:
                yield _Parameter(name, X, "matrix", {"input_first": True} if input_first else {})


def _experts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Keys of (E, 2i, h) ``gate_up_proj`` and (E, h, i) ``down_proj``, or transposes."""
    names = ("gate_up_proj", "down_proj")
    weights = [getattr(module, name, None) for name in names]
    shapes = [global_shape(X) for X in weights if isinstance(X, Tensor)]
    if [len(shape) for shape in shapes] != [3, 3]:
        return {}
    (E, *up), (E_down, *down) = shapes
    for input_first in (False, True):
        (hidden_twice, h), (h_down, hidden) = up, down
        if input_first:
            (h, hidden_twice), (hidden, h_down) = up, down
        if (E, h) == (E_down, h_down) and hidden_twice == 2 * hidden:
            return {name: {"input_first": True} if input_first else {} for name in names}
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
    large = [p for p in parameters if not p.known and _may_be_matrices(p.shape, least)]
    if not large:
        return
    first, shape = large[0].name, large[0].shape
    pattern = re.sub(r"\b\d+\b", "*", first)  # of all layers
    kind = "stack" if len(shape) > 2 else "matrix"
    warnings.warn(
        f"param_groups assigns to {elementwise} {len(large)} tensors that may be matrices, "
        f"such as {first!r} of shape {shape}. For Dion pass e.g. patterns={{{pattern!r}: "
        f"{kind!r}}}, with 'input_first': True if stored as (..., in, out); 'vector' keeps "
        f"{elementwise}.",
        stacklevel=checks.user_stacklevel(),
    )


def _may_be_matrices(shape: tuple[int, ...], least: float) -> bool:
    """Whether a shape has so many elements, and no leading dimension of one."""
    large = len(shape) > 1 and math.prod(shape) >= least
    return large and shape[0] > 1 and min(shape[-2:]) >= LEAST_SIDE
