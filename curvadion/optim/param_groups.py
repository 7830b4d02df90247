"""Parameter groups from a model: which parameters Dion treats as matrices."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from curvadion import checks
from curvadion.layout.placements import global_shape
from curvadion.optim import group_keys
from curvadion.optim.projections import (
    Division,
    concatenates,
    division_of,
    has_gate_in_turns,
    out_in,
)

# Kinds of parameters, by the module that owns them.
KINDS = ("matrix", "stack", "embedding", "head", "vector")
# Learning rates of the kinds that take AdamW or Lion, as multiples of the optimizer's. At its
# default, 0.02, they are those that benchmarks/losses/learning_rates.py found.
LR_RATIOS = {
    "adamw": {"embedding": 0.5, "head": 0.15, "vector": 0.5},
    "lion": {"embedding": 0.15, "head": 0.05, "vector": 0.15},
}
# Modules whose 2-D weights are matrices (in, out): transformers' GPT-2.
INPUT_FIRST_MODULES = ("Conv1D",)
# Parts of names that wrappers add: FSDP1, activation checkpointing, torch.compile.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HEAD_NAMES = "lm_head head output output_projection embed_out score classifier".split()
# Names of a model's last linear layer, or of a sequence that it ends, if it is a head. Earlier
# layers may have them, too, as in torchvision's networks.
LAST_HEAD_NAMES = ("fc", "classifier", "head")
TITAN_EXPERTS = ("w1_EFD", "w2_EDF", "w3_EFD")  # experts, outputs, inputs
# Matrices as narrow as LoRA's take full rank, which costs little there. Their shorter side is
# one of these, and the longer one at least so many times as long.
SKINNY_SIDES = range(4, 65)
SKINNY_RATIO = 8
# Group keys that say how a parameter is divided into matrices: each kind has its own.
SHAPE_KEYS = ("stack_dims", "row_blocks", "column_blocks", "input_first")
BLOCK_KEYS = ("row_blocks", "column_blocks")
# From this share of a model's elements on, convolutions are worth a warning.
CONVOLUTIONAL = 0.5
CONVOLUTION = "convolution, "  # a note
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
    heads: bool = False,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Group a model's parameters by kind, for CurvaDion and Dion.

    Kinds, by module type and name:
        "matrix": 2-D weights of linear layers and of transformers' Conv1D (``input_first``).
        "stack": weights of the experts of transformers (``gate_up_proj``, ``down_proj``) and
            of torchtitan, E matrices (E, m, n); ``stack_dims=1``, with ``input_first`` where
            needed.
        "embedding": weights of nn.Embedding and nn.EmbeddingBag.
        "head": weights tied to an embedding, and of a linear layer that is named like an
            output head or has as many outputs as an embedding has entries. Where other layers
            have as many inputs, only the last linear layer is a head; but layers in numbered
            blocks may have, if they write what the head reads.
        "vector": everything else: norms, biases, convolutions, routers of experts, bare
            parameters.

    Fused Q, K and V, and gates fused with the other half, are as many matrices
    (``row_blocks``), if names, shapes and the numbers of heads of modules or their ``config``
    leave no doubt. With ``heads``, each head of Q, K and V is a matrix, and so are its columns
    of the output projection (``column_blocks``).

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
            or ``{"head": {"lr_ratio": 0.1}}``. Those of "matrix" are also stacks', except for
            ``stack_dims``, ``row_blocks``, ``column_blocks`` and ``input_first``; those of
            "stack" override them.
        patterns: maps shell-style patterns of names to a kind, to group keys, or to both; the
            first match wins: ``{"*.c_attn.weight": {"kind": "matrix", "row_blocks": 3}}``, or
            ``{"wte.weight": {"lr_ratio": 0.3}}`` of the kind that it has anyway.
        heads: whether each attention head is a matrix of its own.
        verbose: print each group with the names of its parameters, and which of them are
            divided, or routers, convolutions or heads.

    Returns:
        Groups of (name, parameter) pairs, without frozen parameters; shared ones appear once.

    Raises:
        TypeError, ValueError: for wrong arguments, patterns that match nothing or a wrong
            shape, undeclared flat weights, or a model without trainable parameters.

    Warns:
        UserWarning: if large tensors with ``elementwise`` may be matrices, if most of the
            model are convolutions, and if a weight may hold several matrices that cannot be
            told apart.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.one_of("elementwise", elementwise, tuple(LR_RATIOS))
    ratios = LR_RATIOS[elementwise]
    if elementwise_lr is not None:
        group_keys.learning_rate("elementwise_lr", elementwise_lr)
    checks.boolean("heads", heads)
    options = options or {}
    for kind, keys in options.items():
        _check("options", kind, keys)
    rules: dict[str, _Rule] = {}
    for pattern, value in (patterns or {}).items():
        rules[pattern] = _rule(pattern, value)

    parameters = list(_parameters(model, elementwise, heads=heads))
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
    if heads:
        _check_heads(model, parameters)
    _warn_of_large(parameters, elementwise)
    _warn_of_convolutions(parameters, elementwise)
    _warn_of_doubts(parameters)

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
        groups += _groups(of_kind, defaults, _options_of(kind, options))
    if verbose:
        _print_groups(groups, parameters)
    return groups


def _check_heads(model: nn.Module, parameters: Sequence[_Parameter]) -> None:
    """Raise ValueError if no parameter has heads, for which the user has asked."""
    if any(p.has_heads for p in parameters):
        return
    matrices = [p.name for p in parameters if p.kind == "matrix"]
    raise ValueError(
        f"heads=True, but no attention of model={type(model).__name__} has heads that can be "
        f"told apart: leave heads out, or write patterns such as "
        f"{{'*.q_proj.weight': {{'row_blocks': 16}}, '*.o_proj.weight': "
        f"{{'column_blocks': 16}}}} for 16 heads, with the names of this model's matrices, "
        f"{matrices[:8]}"
    )


def _print_groups(groups: Sequence[dict[str, Any]], parameters: Sequence[_Parameter]) -> None:
    """Print the groups with the names of their parameters, and the notes of these."""
    for group in groups:
        print({**group, "params": [name for name, _ in group["params"]]})
    notes = {(of_all_layers(p.name), p.note): None for p in parameters if p.note}
    for names, note in notes:
        print(f"{names}: {note}")


class _Rule(NamedTuple):
    """The kind and the group keys of a user's pattern; None is the kind without it."""

    kind: str | None
    keys: Mapping[str, Any]


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
        note: what the listing says of it.
        doubt: why it may hold several matrices; None if that is clear.
        has_heads: whether each head is a matrix.
    """

    name: str
    X: Tensor
    kind: str
    matrix_keys: dict[str, Any] = field(default_factory=dict)
    pattern_keys: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True
    note: str = ""
    doubt: Division | None = None
    has_heads: bool = False

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
    """Group keys, overridden by later ones.

    A later rate, or a later division into blocks, replaces one that is given otherwise.
    """
    result = dict(keys)
    for layer in later:
        if any(key in layer for key in BLOCK_KEYS):
            for key in BLOCK_KEYS:
                result.pop(key, None)
        if "lr" in layer:
            result.pop(group_keys.LR_RATIO, None)
        elif group_keys.LR_RATIO in layer:
            result.pop("lr", None)
        result.update(layer)
    return result


def _options_of(kind: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The user's group keys of a kind; those of matrices are also stacks'."""
    inherited: dict[str, Any] = {}
    if kind == "stack":
        for key, value in options.get("matrix", {}).items():
            if key not in SHAPE_KEYS:
                inherited[key] = value
    return _overridden(inherited, options.get(kind, {}))


def _rule(pattern: str, value: str | Mapping[str, Any]) -> _Rule:
    """The kind and the group keys of a user's pattern."""
    keys = dict(value) if isinstance(value, Mapping) else {"kind": value}
    if "kind" not in keys:
        return _Rule(None, keys)
    kind = keys.pop("kind")
    _check(f"patterns[{pattern!r}]", kind, keys)
    return _Rule(str(kind), keys)


def _check(argument: str, kind: object, keys: object) -> None:
    """Raise an error unless ``kind`` is a kind and ``keys`` are a dictionary."""
    if kind not in KINDS:
        raise ValueError(f"{argument} has the unknown kind {kind!r}: it must be one of {KINDS}")
    if not isinstance(keys, Mapping):
        raise TypeError(f"{argument}[{kind!r}]={keys!r} must be a dict of group keys")


def _route(p: _Parameter, rules: Mapping[str, _Rule]) -> str | None:
    """Apply the first pattern that matches a parameter's name; find keys by its shape.

    Returns:
        The pattern; None if none matches.
    """
    matches = (pattern for pattern in rules if fnmatchcase(p.name, pattern))
    pattern = next(matches, None)
    if pattern is not None:
        _apply(rules[pattern], p, pattern)
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


def _apply(rule: _Rule, p: _Parameter, pattern: str) -> None:
    """Give a parameter the kind and the group keys of a pattern."""
    p.pattern_keys = rule.keys
    if rule.kind is None:
        given = [key for key in SHAPE_KEYS if key in rule.keys]
        if given and p.kind not in ("matrix", "stack"):
            raise ValueError(
                f"patterns[{pattern!r}] gives {given[0]} to {p.name}, which is a {p.kind!r}: "
                f"add 'kind': 'matrix' or 'stack', or mend the pattern"
            )
    else:
        p.is_known = True
    # "vector" for a vector silences a warning, too.
    changes_kind = rule.kind not in (None, p.kind) or rule.kind == "vector"
    if changes_kind or any(key in rule.keys for key in BLOCK_KEYS):
        for key in BLOCK_KEYS:
            p.matrix_keys.pop(key, None)
        p.note = ""
        p.doubt = None
    p.kind = rule.kind or p.kind


def _parameters(model: nn.Module, elementwise: str, *, heads: bool) -> Iterator[_Parameter]:
    """Yield every trainable parameter with its kind, shared ones once."""
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    # Layers with as many outputs are heads. An embedding that is as long as layers are wide,
    # such as one of positions, would make heads of all of them.
    vocabularies = {m.num_embeddings for m in embeddings if m.num_embeddings != m.embedding_dim}
    embedded = {id(m.weight) for m in embeddings}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    linear_weights = {id(m.weight) for m in linear}
    # Behind a wrapper comes the module in it, which has its name.
    modules = {_unwrapped(name): module for name, module in model.named_modules()}
    layers = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    inside = [layer for name, layer in layers.items() if _is_in_block(name)]
    outside = [layer for name, layer in layers.items() if not _is_in_block(name)]
    seen: set[int] = set()
    for wrapped_prefix, module in model.named_modules():
        prefix = _unwrapped(wrapped_prefix)
        experts = _experts(module)
        input_first = type(module).__name__ in INPUT_FIRST_MODULES
        has_matrices = input_first or isinstance(module, (nn.Linear, nn.MultiheadAttention))
        is_router = type(module).__name__.endswith("Router") or _routes(modules, prefix)
        is_last = module in linear[-1:]
        head_widths = vocabularies
        if isinstance(module, nn.Linear) and not is_last:
            head_widths = vocabularies - _widths_read(module, inside, outside)
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
                keys = experts[local_name]
                note = "gate and up of each expert, 2 matrices" if "row_blocks" in keys else ""
                yield _Parameter(name, X, "stack", keys, note=note)
            elif has_gate_in_turns(module, local_name, global_shape(X)):
                keys = {"column_blocks": 2}
                yield _Parameter(name, X, "matrix", keys, note="gate and up, 2 matrices")
            elif is_router or not has_matrices or len(global_shape(X)) != 2:
                yield _vector(name, X, module, elementwise, is_router=is_router)
            elif _is_named(prefix, HEAD_NAMES) or _has_outputs(prefix, module, head_widths):
                yield _Parameter(name, X, "head")
            elif is_last and _is_named(_of_sequence(prefix), LAST_HEAD_NAMES):
                yield _Parameter(name, X, "head", note="head: the last linear layer")
            else:
                yield _matrix_of_layer(name, X, module, modules, heads=heads)


def _vector(
    name: str, X: Tensor, module: nn.Module, elementwise: str, *, is_router: bool
) -> _Parameter:
    """A parameter that takes AdamW or Lion, because its module has no rule for matrices.

    Args:
        name: of the parameter.
        X: the parameter.
        module: that has it.
        elementwise: the algorithm.
        is_router: whether the module is a router.
    """
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    has_vectors = is_convolution or is_router or type(module).__name__.endswith("Norm")
    # Elsewhere a large tensor may be a matrix of a module without a rule.
    is_known = has_vectors or name.endswith("bias")
    note = ""
    if len(global_shape(X)) > 1 and is_router:
        note = f"router, {elementwise}; 'matrix' trains it as Moonlight does"
    elif len(global_shape(X)) > 1 and is_convolution:
        note = CONVOLUTION + elementwise
    return _Parameter(name, X, "vector", is_known=is_known, note=note)


def _matrix_of_layer(
    name: str, X: Tensor, module: nn.Module, modules: Mapping[str, nn.Module], *, heads: bool
) -> _Parameter:
    """A weight of a linear layer or of attention, divided into its matrices.

    Args:
        name: of the parameter.
        X: the parameter.
        module: that has it.
        modules: all of the model, by name.
        heads: whether each head is a matrix.
    """
    in_module = isinstance(module, nn.MultiheadAttention)
    layer = name.removesuffix("_weight") if in_module else name.rpartition(".")[0]
    input_first = type(module).__name__ in INPUT_FIRST_MODULES
    shape = out_in(X, input_first=input_first)
    division = division_of(modules, layer, shape, heads=heads, in_module=in_module)
    return _Parameter(
        name,
        X,
        "matrix",
        {**_storage_keys(input_first), **division.keys},
        note=division.note,
        doubt=division if division.doubt else None,
        has_heads=division.of_heads,
    )


def _unwrapped(name: str) -> str:
    """A name without the parts of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _of_sequence(name: str) -> str:
    """The name of the sequence that a layer is numbered in; of other layers their own."""
    parent, _, last = name.rpartition(".")
    return parent if last.isdigit() and parent else name


def _routes(modules: Mapping[str, nn.Module], prefix: str) -> bool:
    """Whether a module is a router of experts, or a layer of one."""
    for name in (prefix, prefix.rpartition(".")[0]):
        parent, _, last = name.rpartition(".")
        if last in ("router", "shared_expert_gate"):
            return True
        if last == "gate" and hasattr(modules.get(parent), "experts"):
            return True
    return False


def _storage_keys(input_first: bool) -> dict[str, Any]:
    """Group keys of matrices that are stored as (in, out), or as (out, in)."""
    return {"input_first": True} if input_first else {}


def _experts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Group keys of a module's weights that are experts' matrices.

    E experts of input size h and inner size i have gate_up_proj (E, 2i, h) and down_proj
    (E, h, i), or their transposes (E, h, 2i) and (E, i, h). Those of torchtitan say in their
    names how they are stored.

    Returns:
        Group keys by the weights' names; {} for other modules.
    """
    if all(isinstance(getattr(module, name, None), Tensor) for name in TITAN_EXPERTS):
        return {name: {} for name in TITAN_EXPERTS}
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
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
            keys = _storage_keys(input_first)
            halves = {"row_blocks": 2} if concatenates(module) else {}
            return {"gate_up_proj": {**keys, **halves}, "down_proj": {**keys}}
    return {}


def _widths_read(
    layer: nn.Linear, inside: Sequence[nn.Linear], outside: Sequence[nn.Linear]
) -> set[int]:
    """Widths at which another layer may read a layer's outputs, so that it would be no head.

    Args:
        layer: outside numbered blocks.
        inside: all layers in numbered blocks.
        outside: all others.
    """
    widths = {other.in_features for other in outside}
    # A layer that reads what blocks write comes behind them, so they do not read its outputs.
    comes_last = layer.in_features in {other.out_features for other in inside}
    return widths if comes_last else widths | {other.in_features for other in inside}


def _has_outputs(prefix: str, module: nn.Module, widths: set[int]) -> bool:
    """Whether a layer outside numbered blocks has one of these numbers of outputs."""
    return not _is_in_block(prefix) and getattr(module, "out_features", None) in widths


def _is_named(prefix: str, names: Sequence[str]) -> bool:
    """Whether a layer outside numbered blocks has one of these names."""
    return prefix.rpartition(".")[2] in names and not _is_in_block(prefix)


def _is_in_block(prefix: str) -> bool:
    """Whether a module lies inside a numbered block, as ``h.3`` of ``h.3.attn.proj``."""
    *parents, _ = prefix.split(".")
    return any(part.isdigit() for part in parents)


def _warn_of_large(parameters: Sequence[_Parameter], elementwise: str) -> None:
    """Warn about large tensors that no rule knows: they may be matrices."""
    least = min(LARGE, LARGE_SHARE * sum(math.prod(p.shape) for p in parameters))
    large = [p for p in parameters if not p.is_known and _may_be_matrices(p.shape, least)]
    if not large:
        return
    example = large[0]
    pattern = of_all_layers(example.name)
    kind = "stack" if len(example.shape) > 2 else "matrix"
    warnings.warn(
        f"param_groups assigns to {elementwise} {len(large)} tensors that may be matrices, "
        f"such as {example.name!r} of shape {example.shape}. For Dion pass e.g. "
        f"patterns={{{pattern!r}: {kind!r}}}, with 'input_first': True if stored as "
        f"(..., in, out); 'vector' keeps {elementwise}.",
        stacklevel=checks.user_stacklevel(),
    )


def _warn_of_convolutions(parameters: Sequence[_Parameter], elementwise: str) -> None:
    """Warn if convolutions, which are no matrices unless a pattern says so, are most of a model."""
    convolutions = [p for p in parameters if p.note.startswith(CONVOLUTION)]
    numel = sum(math.prod(p.shape) for p in convolutions)
    share = numel / sum(math.prod(p.shape) for p in parameters)
    if share < CONVOLUTIONAL:
        return
    warnings.warn(
        f"param_groups assigns to {elementwise} {len(convolutions)} convolutions, "
        f"{share:.0%} of the model, such as {convolutions[-1].name!r}. To train one as a matrix "
        f"(outputs, the rest) pass patterns={{{convolutions[-1].name!r}: 'matrix'}}; 'vector' "
        f"keeps {elementwise}.",
        stacklevel=checks.user_stacklevel(),
    )


def _warn_of_doubts(parameters: Sequence[_Parameter]) -> None:
    """Warn of weights that may hold several matrices."""
    doubtful = [(p, p.doubt) for p in parameters if p.doubt is not None]
    if not doubtful:
        return
    example, division = doubtful[0]
    warnings.warn(
        f"param_groups keeps {len(doubtful)} weights whole that may hold several matrices, such "
        f"as {example.name!r} of shape {example.shape}: {division.doubt}. Pass e.g. "
        f"patterns={{{of_all_layers(example.name)!r}: {division.example}}}; "
        f"{{'row_blocks': 1}} keeps one matrix.",
        stacklevel=checks.user_stacklevel(),
    )


def of_all_layers(name: str) -> str:
    """A pattern of the parameters with this name in all layers."""
    return re.sub(r"\b\d+\b", "*", name)


def _may_be_matrices(shape: tuple[int, ...], least: float) -> bool:
    """Whether a shape has at least so many elements, in matrices that are not narrow.

    A leading dimension of one is for broadcasting, as in position embeddings of (1, length,
    width).
    """
    if len(shape) < 2 or math.prod(shape) < least:
        return False
    return shape[0] > 1 and min(shape[-2:]) >= LEAST_SIDE
