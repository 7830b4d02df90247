"""The groups of transformers' models are those of the table in docs/layouts.md."""

from __future__ import annotations

import re

import pytest

from curvadion import param_groups
from support.documents.doc_blocks import ROOT

transformers = pytest.importorskip("transformers", minversion="5")

KINDS = ("matrix", "stack", "embedding", "head", "vector")
PAGE = (ROOT / "docs" / "layouts.md").read_text("utf-8")
TABLE = PAGE.split("| with `heads=True` |\n")[1].split("\n\n")[0].splitlines()[1:]
CELLS = {}  # by family
for line in TABLE:
    families, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    CELLS.update(dict.fromkeys(families.split(", "), cells))

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
MODELS = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**GROUPED, "num_experts": 4}),
    "Phi-3": ("Phi3ForCausalLM", GROUPED),
    "GPT-2": ("GPT2LMHeadModel", SIZES),
    "GPT-NeoX": ("GPTNeoXForCausalLM", SIZES),
    "BERT": ("BertForMaskedLM", SIZES),
}


def test_the_table_has_all_models():
    assert CELLS.keys() == MODELS.keys()


def groups_of(model, *, heads=False):
    """By name of a weight: its kind, row blocks and column blocks."""
    options = {kind: {"lr": float(i)} for i, kind in enumerate(KINDS)}
    found = {}
    for group in param_groups(model, options=options, heads=heads):
        divided = (group.get("row_blocks", 1), group.get("column_blocks", 1))
        for name, _ in group["params"]:
            found[name] = (KINDS[int(group["lr"])], *divided)
    return found


def count(blocks):
    return blocks if isinstance(blocks, int) else len(blocks)


def names_of(entries, names):
    """The weights that entries of the table name; each entry names some."""
    matched = set()
    for entry in entries:
        found = {n for n in names if f".{n}".removesuffix(".weight").endswith(f".{entry}")}
        assert found, entry
        matched |= found
    return matched


def quoted(text):
    return re.findall(r"`([\w.]+)`", text)


@pytest.mark.parametrize("family", MODELS)
def test_groups_are_those_of_the_table(family):
    architecture, sizes = MODELS[family]
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**sizes))
    one, several, elementwise, heads = CELLS[family]
    groups = groups_of(model)

    def are_of(kind):
        return {name for name, group in groups.items() if group[0] == kind}

    embeddings, head = elementwise.split(";")
    assert names_of(quoted(embeddings), groups) == are_of("embedding")
    assert names_of(quoted(head), groups) == are_of("head")
    wanted = dict.fromkeys(names_of(quoted(one), groups), 1)
    for entry, blocks in re.findall(r"`([\w.]+)` \((\d)", several):
        wanted |= dict.fromkeys(names_of([entry], groups), int(blocks))
    blocks = {name: count(groups[name][1]) for name in are_of("matrix") | are_of("stack")}
    assert blocks == wanted

    if heads.startswith("as "):
        heads = CELLS[heads.removeprefix("as ")][-1]
    rows, columns = (names_of(quoted(part), groups) for part in heads.split("columns of"))
    changed = {
        name: new for name, new in groups_of(model, heads=True).items() if new != groups[name]
    }
    assert changed.keys() == rows | columns
    grouped = sizes.get("num_key_value_heads", 4)
    for name, (_, row_blocks, column_blocks) in changed.items():
        if name in columns:
            assert (row_blocks, column_blocks) == (1, 4)
        else:
            is_fused = any(part in name for part in ("qkv_proj", "c_attn", "query_key_value"))
            is_key = any(part in name for part in ("k_proj", "v_proj"))
            of_separate = grouped if is_key and not is_fused else 4
            assert (row_blocks, column_blocks) == (4 + 2 * grouped if is_fused else of_separate, 1)
