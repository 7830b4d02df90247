"""Weights of attention and of gated layers that hold several matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from curvadion.layout.placements import global_shape

# Layers whose outputs are all of Q, then all of K, then all of V. "in_proj" is that of
# nn.MultiheadAttention only: other modules call other things so.
FUSED = ("qkv", "qkv_proj", "wqkv", "Wqkv", "c_attn")
# Layers whose outputs are those of one head after another: its Q, K and V.
FUSED_BY_HEAD = ("query_key_value", "linear_qkv")
# Modules of transformers and torchtitan whose FUSED layers mix Q, K and V of heads, or of groups
# of heads.
MIXED = ("CodeGenAttention", "MiniMaxLightningAttention", "FusedQKVLinear")
QUERIES = "q_proj query wq q q_lin query_proj to_q q_attn q_b_proj".split()
KEYS_AND_VALUES = (
    "k_proj v_proj key value wk wv k v k_lin v_lin key_proj value_proj to_k to_v".split()
)
LATENT_KEYS_AND_VALUES = ("kv_b_proj",)  # K and V of each head of a query
OUTPUTS = "o_proj out_proj wo Wo o c_proj proj dense out_lin".split()
# Layers whose outputs are those of the gate, then those of the other half. Some modules have
# layers of these names without a gate.
GATED = ("gate_up_proj", "gate_up", "w13", "w12", "wi", "Wi")
SURELY_GATED = ("gate_up_proj", "gate_up", "w13")

# What modules and their configurations call numbers of heads, and the elements of a head.
_QUERY_COUNTS = "num_attention_heads num_heads n_heads n_head nhead".split()
_KEY_VALUE_COUNTS = (
    "num_key_value_heads num_kv_heads n_kv_heads n_kv_head kv_heads kv_n_heads".split()
)
_SIZES = "head_dim head_size attention_head_size key_value_proj_dim".split()

Modules = Mapping[str, nn.Module]  # by name, without wrappers


class Division(NamedTuple):
    """How a weight is divided into matrices.

    Args:
        keys: row_blocks or column_blocks; {}: it is one matrix.
        note: for the listing of groups.
        of_heads: whether each head is a matrix.
        doubt: why it may hold several matrices that cannot be told apart; "" if it is clear.
        example: group keys that would divide it, for a warning.
    """

    keys: Mapping[str, Any] = MappingProxyType({})
    note: str = ""
    of_heads: bool = False
    doubt: str = ""
    example: str = ""


ONE_MATRIX = Division()


class _Heads(NamedTuple):
    """The heads of an attention module; None: unknown."""

    queries: int | None
    keys: int | None
    size: int | None


def division_of(
    modules: Modules, name: str, shape: tuple[int, int], *, heads: bool, in_module: bool
) -> Division:
    """How the weight of a linear layer is divided.

    Args:
        modules: of the model.
        name: of the layer; with in_module, of a weight of the module without "_weight".
        shape: of the weight, (outputs, inputs).
        heads: whether each head is a matrix.
        in_module: whether the weight belongs to an attention module, not to a layer in it.
    """
    parent, _, last = name.rpartition(".")
    module = modules.get(parent)
    if module is None:
        return ONE_MATRIX
    if last in GATED:
        return _gate_and_other(module, last, shape)
    if in_module and last == "in_proj":
        return _query_key_value(modules, parent, shape, heads=heads)
    if last in FUSED_BY_HEAD or (last in FUSED and _mixes(module)):
        return _mixed(modules, parent, shape, heads=heads)
    if last in FUSED:
        return _query_key_value(modules, parent, shape, heads=heads)
    if heads:
        return _heads_of_projection(modules, name, shape)
    return ONE_MATRIX


def has_gate_in_turns(module: nn.Module, local_name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is (outputs, 2, inputs), of a gate and the other half: torchtitan's w13."""
    if local_name not in SURELY_GATED or len(shape) != 3 or shape[1] != 2:
        return False
    outputs, _, inputs = shape
    return (outputs, inputs) in _sizes_of_layers(module)


def _sizes_of_layers(module: nn.Module) -> list[tuple[int | None, int | None]]:
    """Inputs and outputs of the modules in a module; None of those that are no linear layers."""
    sizes = []
    for child in _children(module).values():
        sizes.append((getattr(child, "in_features", None), getattr(child, "out_features", None)))
    return sizes


def concatenates(experts: nn.Module) -> bool:
    """Whether all rows of the gate come before those of the other half, in experts."""
    return bool(getattr(experts, "is_concatenated", True))


def _gate_and_other(module: nn.Module, last: str, shape: tuple[int, int]) -> Division:
    """Gate and other half of a gated layer."""
    rows, columns = shape
    # Only the layer behind it says how many of its outputs are multiplied.
    behind = _sizes_of_layers(module)
    if (rows / 2, columns) in behind and (rows, columns) not in behind:
        return Division({"row_blocks": 2}, "gate and up, 2 matrices")
    if last not in SURELY_GATED:
        return ONE_MATRIX
    doubt = f"no layer beside it has {rows // 2} inputs, as one behind a gate would"
    return Division(doubt=doubt, example="{'row_blocks': 2}")


def _query_key_value(
    modules: Modules, attention: str, shape: tuple[int, int], *, heads: bool
) -> Division:
    """Q, K and V of a layer with all of one after all of the other.

    Args:
        modules: of the model.
        attention: the name of the module with the layer.
        shape: of the weight, (outputs, inputs).
        heads: whether each head is a matrix.
    """
    rows, columns = shape
    known = _heads_of(modules, attention)
    parts = "Q, K and V"
    sizes = _sizes(rows, columns, known)
    if "q_attn" in _children(modules[attention]) and rows == 2 * columns:
        parts = "K and V"  # of a cross attention, whose Q is in q_attn
        sizes = [columns, columns]
    if sizes is None:
        doubt = f"its {rows} rows do not fit {_text(known)}"
        return Division(doubt=doubt, example="{'row_blocks': [q, k, v]}")
    if not heads:
        blocks: int | list[int] = sizes if len(set(sizes)) > 1 else len(sizes)
        return Division({"row_blocks": blocks}, f"fused {parts}, {len(sizes)} matrices")
    size = known.size
    if size is None and known.queries is not None and sizes[0] % known.queries == 0:
        size = sizes[0] // known.queries
    if size is None or any(part % size for part in sizes):
        return _unknown_heads(known, "row_blocks")
    count = rows // size
    return _of_heads("row_blocks", count, f"fused {parts}", size)


def _sizes(rows: int, columns: int, known: _Heads) -> list[int] | None:
    """Rows of Q, K and V; None if what is known does not determine them."""
    queries, keys, size = known
    if queries is None or (keys is None and size is None):
        return [columns] * 3 if rows == 3 * columns else None
    if keys is None and size is not None:
        keys = (rows // size - queries) // 2
        if 2 * keys == queries:
            return None  # or K and V alone, of a query from elsewhere
    elif size is None and keys is not None:
        size = rows // (queries + 2 * keys)
        if rows == 3 * columns and keys != queries:
            return None  # or as many heads of each, and numbers of another attention
    assert keys is not None
    assert size is not None
    if keys < 1 or queries % keys or (queries + 2 * keys) * size != rows:
        return None
    return [queries * size, keys * size, keys * size]


def _mixed(modules: Modules, attention: str, shape: tuple[int, int], *, heads: bool) -> Division:
    """Q, K and V of one head after another, which are no blocks unless each head is one.

    Args:
        modules: of the model.
        attention: the name of the module with the layer.
        shape: of the weight, (outputs, inputs).
        heads: whether each head is a matrix.
    """
    rows, columns = shape
    if not heads:
        return Division(
            note="Q, K and V of each head are neighbours: one matrix, or heads=True divides them"
        )
    known = _heads_of(modules, attention)
    size = known.size
    if size is None and known.queries is not None and rows == 3 * columns:
        size = columns // known.queries
    if size is None or rows % size:
        return _unknown_heads(known, "row_blocks")
    return _of_heads("row_blocks", rows // size, "Q, K and V", size)


def _heads_of_projection(modules: Modules, name: str, shape: tuple[int, int]) -> Division:
    """Heads of a projection to Q, K or V, or from all heads to the output."""
    rows, columns = shape
    parent, _, last = name.rpartition(".")
    if last in OUTPUTS:
        attention = _attention_before(modules, parent)
        if attention is None:
            return ONE_MATRIX
        known = _heads_of(modules, attention)
        count = known.queries
        is_latent = any(key in _children(modules[attention]) for key in LATENT_KEYS_AND_VALUES)
        if not count or not _fits(count, columns, None if is_latent else known.size):
            return _unknown_heads(known, "column_blocks")
        return _of_heads("column_blocks", count, "the output projection", columns // count)
    if last not in (*QUERIES, *KEYS_AND_VALUES, *LATENT_KEYS_AND_VALUES):
        return ONE_MATRIX
    if not _is_attention(modules[parent]):
        return ONE_MATRIX
    known = _heads_of(modules, parent)
    count = known.queries
    size = known.size
    if last in KEYS_AND_VALUES:
        if size is None and count is not None:
            size = _query_rows(modules[parent]) // count
        count = known.keys or (rows // size if size else None)
    elif last == "q_b_proj" or last in LATENT_KEYS_AND_VALUES:
        size = None  # which differs between Q, K and V
    if not count or not _fits(count, rows, size):
        return _unknown_heads(known, "row_blocks")
    return _of_heads("row_blocks", count, last, rows // count)


def _fits(count: int, length: int, size: int | None) -> bool:
    """Whether so many heads, of this size if it is known, have this length."""
    return length % count == 0 and (size is None or size * count == length)


def _of_heads(key: str, count: int, what: str, size: int) -> Division:
    """A weight of which each head is a matrix.

    Args:
        key: row_blocks or column_blocks.
        count: the number of heads.
        what: the weight holds, for the listing.
        size: rows or columns of a head.
    """
    dimension = key.removesuffix("_blocks")
    note = f"heads of {what}, {count} matrices of {size} {dimension}s"
    return Division({key: count}, note, of_heads=True)


def _unknown_heads(known: _Heads, key: str) -> Division:
    """A weight of heads that cannot be told apart."""
    doubt = f"its heads do not follow from {_text(known)}"
    return Division(doubt=doubt, example=f"{{{key!r}: 16}}")


def _text(known: _Heads) -> str:
    """What is known of the heads, for a warning."""
    return f"{known.queries} heads of queries, {known.keys} of keys, of size {known.size}"


def _mixes(module: nn.Module) -> bool:
    """Whether a module's fused layer has Q, K and V of one head after another."""
    # GPT-BigCode's does unless all heads have one K and V.
    return type(module).__name__.endswith(MIXED) or getattr(module, "multi_query", True) is False


def _is_attention(module: nn.Module) -> bool:
    """Whether a module has projections to Q, K and V."""
    names = {*_children(module), *(name for name, _ in module.named_parameters(recurse=False))}
    if names & {*FUSED, *FUSED_BY_HEAD} or isinstance(module, nn.MultiheadAttention):
        return True
    return bool(names & set(QUERIES)) and bool(names & {*KEYS_AND_VALUES, *LATENT_KEYS_AND_VALUES})


def _attention_before(modules: Modules, parent: str) -> str | None:
    """The module with the heads of an output projection in ``parent``."""
    layers = _children(modules[parent])
    # torchtitan's attention has projections to Q, K and V in a module of their own.
    if _is_attention(modules[parent]) or any(map(_lacks_output, layers.values())):
        return parent
    # transformers' BERT has attention.self and attention.output.dense.
    above, _, last = parent.rpartition(".")
    if last != "output" or above not in modules:
        return None
    for name, child in _children(modules[above]).items():
        if _lacks_output(child):
            return f"{above}.{name}"
    return None


def _lacks_output(module: nn.Module) -> bool:
    """Whether an attention module leaves its output projection to the module around it.

    Beside others a layer of such a name is any layer, perhaps one of an MLP.
    """
    return _is_attention(module) and not set(OUTPUTS).intersection(_children(module))


def _query_rows(attention: nn.Module) -> int:
    """The outputs of an attention module's layer of queries; 0 without one."""
    for name, child in _children(attention).items():
        if name in QUERIES:
            return int(getattr(child, "out_features", 0))
    return 0


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """The modules in a module, without its wrappers."""
    return dict(module.named_children())


def _heads_of(modules: Modules, attention: str) -> _Heads:
    """Numbers of heads: an attention module's, or those of the nearest module around it."""
    size = _number([modules[attention]], _SIZES)
    name = attention
    while True:
        module = modules.get(name)
        if module is not None:
            sources = [module, getattr(module, "config", None)]
            queries = _number(sources, _QUERY_COUNTS)
            if queries is not None:
                return _Heads(queries, _number(sources, _KEY_VALUE_COUNTS), size)
        if not name:
            return _Heads(None, None, size)
        name = name.rpartition(".")[0]


def _number(sources: Sequence[object], names: Sequence[str]) -> int | None:
    """The first of these attributes that is a positive number."""
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def out_in(X: Tensor, *, input_first: bool) -> tuple[int, int]:
    """The shape of a layer's weight as (outputs, inputs), over all ranks."""
    rows, columns = global_shape(X)
    return (columns, rows) if input_first else (rows, columns)
