"""From a model to parameter groups: what is a matrix to Dion, and what is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from curvadion.sharding import global_shape

# What a parameter is, by the module that owns it.
KINDS = ("matrix", "embedding", "head", "vector")
# Modules other than nn.Linear whose 2-D weights are matrices to multiply activations with.
MATRIX_MODULES = ("Conv1D",)
# Parts of names that wrappers add: FSDP1, activation checkpointing, torch.compile.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
HEAD_NAMES = ("lm_head", "head", "output", "embed_out", "score", "classifier", "output_projection")


def param_groups(
    model: nn.Module,
    *,
    elementwise: Literal["adamw", "lion"] = "adamw",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    patterns: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups for CurvaDion and Dion, one per kind of parameter that the model has.

    Kinds, by module type and name:
        "matrix": 2-D weights of linear layers; algorithm "dion".
        "embedding": weights of nn.Embedding and nn.EmbeddingBag.
        "head": weights tied to an embedding, and of a linear layer that is named like an output
            head or has as many outputs as an embedding has entries.
        "vector": all others: norms, biases, convolutions, parameters of their own.
    Kinds other than "matrix" take ``elementwise``, without weight decay unless ``options`` say so.

    Args:
        model: the module to optimize.
        elementwise: "adamw" or "lion", for all that is no matrix.
        options: extra group keys by kind, e.g. ``{"matrix": {"lr": 0.02}, "head": {"lr": 3e-3}}``.
        patterns: shell-style patterns of parameter names to kinds, over the rules above; the
            first that matches counts, e.g. ``{"*.router.weight": "vector"}``.
        verbose: print what went where.

    Returns:
        Groups whose ``params`` are (name, parameter) pairs; frozen parameters are left out, shared
        ones appear once.

    Raises:
        TypeError: if ``model`` is not a module, or options of a kind are no dict.
        ValueError: for an unknown kind, a pattern that matches nothing, a pattern that makes a
            matrix of a vector, flat weights whose shapes nobody has declared,
            or a model without trainable parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    options, patterns = dict(options or {}), dict(patterns or {})
    if elementwise not in ("adamw", "lion"):
        raise ValueError(f"elementwise={elementwise!r} must be 'adamw' or 'lion'")
    for argument, kinds in (("options", options.keys()), ("patterns", patterns.values())):
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"{argument} names the kind {kind!r}; kinds are {KINDS}")
    for kind, keys in options.items():
        if not isinstance(keys, Mapping):
            raise TypeError(f"options[{kind!r}]={keys!r} must be a dict of group keys")
        if taken := {"params", "param_names"} & set(keys):
            raise ValueError(
                f"options[{kind!r}] has {sorted(taken)}: the model gives the parameters"
            )

    members: dict[str, list[tuple[str, Tensor]]] = {kind: [] for kind in KINDS}
    matched = set()
    for name, parameter, kind in _kinds(model):
        for pattern, wanted in patterns.items():
            if fnmatchcase(name, pattern):
                matched.add(pattern)
                kind = wanted
                break
        if kind == "matrix" and len(global_shape(parameter)) < 2:
            raise ValueError(f"{name} of shape {global_shape(parameter)} cannot be a 'matrix'")
        members[kind].append((name, parameter))
    if unmatched := [p for p in patterns if p not in matched]:
        raise ValueError(
            f"patterns {unmatched} match no trainable parameter (or only ones an earlier pattern "
            f"took); names look like {[name for name, _, _ in _kinds(model)][:4]}"
        )
    if not any(members.values()):
        raise ValueError("model has no trainable parameters: nothing to optimize")

    groups = [
        {"params": members[kind], **_defaults(kind, elementwise), **options.get(kind, {})}
        for kind in KINDS
        if members[kind]
    ]
    if verbose:
        print(describe(groups))
    return groups


def describe(groups: list[dict[str, Any]]) -> str:
    """One line per group and one per parameter: what went where."""
    lines = []
    for group in groups:
        settings = ", ".join(f"{k}={v}" for k, v in group.items() if k != "params")
        count = sum(math.prod(global_shape(parameter)) for _, parameter in group["params"])
        lines.append(f"{settings}: {len(group['params'])} parameters, {count:,} elements")
        lines.extend(f"  {name} {global_shape(p)}" for name, p in group["params"])
    return "\n".join(lines)


def _defaults(kind: str, elementwise: str) -> dict[str, Any]:
    if kind == "matrix":
        return {"algorithm": "dion"}
    return {"algorithm": elementwise, "weight_decay": 0.0}


def _kinds(model: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Name, parameter and kind of every trainable parameter, shared ones once."""
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    vocabularies = {m.num_embeddings for m in embeddings}
    embedded = {id(m.weight) for m in embeddings}
    linear_weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    seen: set[int] = set()
    for wrapped_prefix, module in model.named_modules():
        prefix = ".".join(part for part in wrapped_prefix.split(".") if part not in WRAPPERS)
        for local_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{local_name}" if prefix else local_name
            if id(parameter) in embedded | linear_weights and len(global_shape(parameter)) != 2:
                raise ValueError(
                    f"{name} of shape {tuple(parameter.shape)} is the weight of a "
                    f"{type(module).__name__}, but flat: with FullyShardedDataParallel call "
                    f"curvadion.integrations.fsdp.declare_flat_shards(model) first."
                )
            if id(parameter) in embedded:
                kind = "head" if id(parameter) in linear_weights else "embedding"
            elif not _is_matrix(module, parameter):
                kind = "vector"
            elif _is_head(prefix, module, vocabularies):
                kind = "head"
            else:
                kind = "matrix"
            yield name, parameter, kind


def _is_matrix(module: nn.Module, parameter: Tensor) -> bool:
    known = isinstance(module, (nn.Linear, nn.MultiheadAttention))
    return (known or type(module).__name__ in MATRIX_MODULES) and len(global_shape(parameter)) == 2


def _is_head(prefix: str, module: nn.Module, vocabularies: set[int]) -> bool:
    """Outside the numbered blocks, and named like an output head or as wide as a vocabulary.

    Inside them a width may equal the number of entries of a table of positions.
    """
    *parents, last = prefix.split(".")
    if any(part.isdigit() for part in parents):
        return False
    return last in HEAD_NAMES or getattr(module, "out_features", None) in vocabularies
