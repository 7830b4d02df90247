"""Which parameter of which model goes where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from curvadion import AlwaysOpen, CurvaDion, Dion, param_groups

KINDS = ("matrix", "embedding", "head", "vector")


def routes(model, **arguments):
    """Names by kind; every kind is told apart by a learning rate of its own."""
    options = {kind: {"lr": float(i)} for i, kind in enumerate(KINDS)}
    groups = param_groups(model, options=options, **arguments)
    return {KINDS[int(g["lr"])]: [name for name, _ in g["params"]] for g in groups}


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


class Block(nn.Module):
    def __init__(self, width, attention):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = attention
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )


class FusedAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)


class GPT(nn.Module):
    def __init__(self, *, vocabulary=50, width=8, positions=16, layers=2, tied=False):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, FusedAttention(width)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def block_matrices(layers=2):
    parts = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
    return [f"h.{layer}.{part}.weight" for layer in range(layers) for part in parts]


def test_gpt():
    routed = routes(GPT())
    assert routed["matrix"] == block_matrices()
    assert routed["embedding"] == ["wte.weight", "wpe.weight"]
    assert routed["head"] == ["lm_head.weight"]
    assert set(routed["vector"]) == trainable(GPT()) - {
        name for kind in KINDS[:3] for name in routed[kind]
    }


def test_tied_gpt_has_one_head_and_no_second_name_for_it():
    routed = routes(GPT(tied=True))
    assert routed["head"] == ["wte.weight"]
    assert routed["embedding"] == ["wpe.weight"]
    assert routed["matrix"] == block_matrices()


def test_head_is_known_by_its_width_under_any_name():
    model = GPT()
    model.to_words = model.lm_head
    del model.lm_head
    assert routes(model)["head"] == ["to_words.weight"]


def test_as_many_positions_as_the_width_makes_no_heads():
    """GPT-2 medium: 1024 positions, width 1024."""
    routed = routes(GPT(positions=8, width=8))
    assert routed["matrix"] == block_matrices()
    assert routed["head"] == ["lm_head.weight"]


@pytest.mark.parametrize("name", ["head", "lm_head", "output", "classifier", "score", "embed_out"])
def test_output_heads_by_name(name):
    model = nn.ModuleDict({"body": nn.Linear(4, 5), name: nn.Linear(5, 3)})
    routed = routes(model)
    assert routed == {
        "matrix": ["body.weight"],
        "head": [f"{name}.weight"],
        "vector": ["body.bias", f"{name}.bias"],
    }


@pytest.mark.parametrize("name", ["head", "output"])
def test_heads_inside_numbered_blocks_are_matrices(name):
    """BERT calls each layer's feed-forward projection ``output``, and attention has heads."""
    attention = nn.ModuleDict({name: nn.Linear(8, 8, bias=False)})
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(8, attention)])})
    assert f"layers.0.attn.{name}.weight" in routes(model)["matrix"]


def test_transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    routed = routes(model)
    parts = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight")
    expected = {f"layers.{i}.{part}" for i in range(2) for part in (*parts, "linear2.weight")}
    assert set(routed["matrix"]) == expected
    assert set(routed["vector"]) == trainable(model) - expected
    assert set(routed) == {"matrix", "vector"}


def test_attention_with_separate_projections_and_biases():
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    routed = routes(attention)
    assert set(routed["matrix"]) == {
        *(f"{part}_proj_weight" for part in "qkv"),
        "out_proj.weight",
    }
    assert {"bias_k", "bias_v", "in_proj_bias", "out_proj.bias"} == set(routed["vector"])


def test_subclasses_of_matrix_modules():
    class Attention(nn.MultiheadAttention):
        pass

    class Projection(nn.Linear):
        pass

    model = nn.ModuleDict({"attn": Attention(8, 2), "project": Projection(8, 4, bias=False)})
    assert set(routes(model)["matrix"]) == {
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "project.weight",
    }


def test_convolutions_are_no_matrices():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(8, 8, 1), nn.Flatten(), nn.Linear(8, 4)
    )
    routed = routes(model)
    assert routed["matrix"] == ["4.weight"]
    assert set(routed["vector"]) == trainable(model) - {"4.weight"}


def test_parameters_of_their_own_are_vectors():
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(4, 4))
    model.scale = nn.Parameter(torch.ones(()))
    model.linear = nn.Linear(4, 2, bias=False)
    assert routes(model) == {"matrix": ["linear.weight"], "vector": ["table", "scale"]}


def test_root_that_is_a_layer():
    assert routes(nn.Linear(3, 4)) == {"matrix": ["weight"], "vector": ["bias"]}
    assert routes(nn.EmbeddingBag(5, 3)) == {"embedding": ["weight"]}


def test_shared_modules_count_once_under_their_first_name():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": nn.Sequential(shared)})
    assert routes(model) == {"matrix": ["encoder.0.weight"], "vector": ["encoder.0.bias"]}


def test_weight_shared_between_layers_counts_once():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    assert routes(model) == {"matrix": ["a.weight"]}


def test_frozen_parameters_are_left_out():
    model = GPT()
    model.wte.requires_grad_(False)
    model.h[0].requires_grad_(False)
    routed = routes(model)
    assert routed["embedding"] == ["wpe.weight"]
    assert routed["matrix"] == [n for n in block_matrices() if n.startswith("h.1")]
    assert {name for names in routed.values() for name in names} == trainable(model)


def test_head_of_a_frozen_vocabulary_is_still_a_head():
    model = GPT()
    model.wte.requires_grad_(False)
    model.to_words = model.lm_head
    del model.lm_head
    assert routes(model)["head"] == ["to_words.weight"]


# ---------------------------------------------------------------- patterns and options


def test_patterns_overrule_the_rules():
    routed = routes(GPT(), patterns={"*.attn.proj.weight": "vector", "lm_head.weight": "matrix"})
    assert routed["matrix"] == [n for n in block_matrices() if "proj" not in n] + ["lm_head.weight"]
    assert {"h.0.attn.proj.weight", "h.1.attn.proj.weight"} < set(routed["vector"])
    assert "head" not in routed


def test_first_pattern_that_matches_counts():
    narrow, wide = ("h.0.mlp.0.weight", "matrix"), ("h.0.*.weight", "vector")
    assert "h.0.mlp.0.weight" in routes(GPT(), patterns=dict([narrow, wide]))["matrix"]
    assert "h.0.mlp.2.weight" not in routes(GPT(), patterns=dict([narrow, wide]))["matrix"]
    with pytest.raises(ValueError, match="earlier pattern"):
        routes(GPT(), patterns=dict([wide, narrow]))


def test_patterns_are_case_sensitive_and_whole():
    with pytest.raises(ValueError, match="match no"):
        routes(GPT(), patterns={"LM_HEAD.weight": "matrix"})
    with pytest.raises(ValueError, match="match no"):
        routes(GPT(), patterns={"lm_head": "matrix"})


def test_pattern_reaches_a_tied_weight_by_its_first_name():
    routed = routes(GPT(tied=True), patterns={"wte.weight": "matrix"})
    assert "wte.weight" in routed["matrix"]


def test_groups_hold_algorithms_names_and_options():
    model = GPT()
    groups = param_groups(
        model,
        elementwise="lion",
        options={"matrix": {"lr": 0.1, "mu": 0.9}, "head": {"weight_decay": 0.2}},
    )
    by_name = {name: (p, group) for group in groups for name, p in group["params"]}
    assert all(by_name[name][0] is p for name, p in model.named_parameters())
    matrix = by_name["h.0.mlp.0.weight"][1]
    assert (matrix["algorithm"], matrix["lr"], matrix["mu"]) == ("dion", 0.1, 0.9)
    assert "weight_decay" not in matrix
    assert by_name["lm_head.weight"][1]["weight_decay"] == 0.2
    assert by_name["wte.weight"][1]["weight_decay"] == 0.0
    for name in ("wte.weight", "lm_head.weight", "norm.bias"):
        assert by_name[name][1]["algorithm"] == "lion"


def test_matrices_may_take_an_elementwise_algorithm():
    groups = param_groups(GPT(), options={"matrix": {"algorithm": "adamw"}})
    optimizer = Dion(groups)
    assert {group["algorithm"] for group in optimizer.param_groups} == {"adamw"}


def test_options_are_not_changed():
    options = {"matrix": {"lr": 0.1}}
    param_groups(GPT(), options=options, patterns={"lm_head.weight": "matrix"})
    assert options == {"matrix": {"lr": 0.1}}


def test_silent_unless_verbose(capsys):
    param_groups(GPT())
    assert capsys.readouterr().out == ""


def test_verbose_tells_where_every_parameter_goes(capsys):
    model = GPT()
    param_groups(model, verbose=True, options={"head": {"lr": 0.003}})
    printed = capsys.readouterr().out
    for name, p in model.named_parameters():
        assert f"{name} {tuple(p.shape)}" in printed
    assert "algorithm=dion" in printed
    assert "algorithm=adamw" in printed
    assert "lr=0.003" in printed
    total = sum(p.numel() for name, p in model.named_parameters() if name in block_matrices())
    assert f"{len(block_matrices())} parameters, {total:,} elements" in printed


def test_optimizer_reports_by_these_names():
    model = GPT()
    optimizer = CurvaDion(param_groups(model))
    assert [n for g in optimizer.param_groups for n in g["param_names"]] == [
        name for names in routes(model).values() for name in names
    ]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.report.rmmc_parameter in block_matrices()


# ---------------------------------------------------------------- any model

LEAVES = {
    "linear": lambda: nn.Linear(3, 5),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "embedding": lambda: nn.Embedding(5, 3),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "norm": lambda: nn.LayerNorm(4),
    "conv": lambda: nn.Conv1d(2, 3, 2),
    "lstm": lambda: nn.LSTM(3, 2),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "own": lambda: nn.ParameterList([torch.zeros(2, 2), torch.zeros(3)]),
    "nothing": lambda: nn.ReLU(),
}
NAMES = st.sampled_from(["head", "layers", "0", "7", "attn", "lm_head", "x"])
SMALL_LISTS = {"min_size": 1, "max_size": 4}


@st.composite
def models(draw):
    """Trees of modules in which modules are shared, weights tied and parameters frozen."""
    pool = [LEAVES[leaf]() for leaf in draw(st.lists(st.sampled_from([*LEAVES]), **SMALL_LISTS))]
    for _ in range(draw(st.integers(1, 4))):
        children = draw(st.dictionaries(NAMES, st.sampled_from(pool), **SMALL_LISTS))
        pool.append(nn.ModuleDict(children))
    model = pool[-1]
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features == 3]
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if linears and embeddings and draw(st.booleans()):
        linears[0].weight = embeddings[0].weight
    for p in model.parameters():
        p.requires_grad_(draw(st.booleans()))
    return model


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models())
def test_every_trainable_parameter_exactly_once(model):
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not expected:
        with pytest.raises(ValueError, match="no trainable parameters"):
            param_groups(model)
        return
    groups = param_groups(model)
    routed = [(name, p) for group in groups for name, p in group["params"]]
    assert len(routed) == len(expected)
    assert all(expected[name] is p for name, p in routed)
    assert all(p.dim() == 2 for g in groups if g["algorithm"] == "dion" for _, p in g["params"])
    optimizer = CurvaDion(groups, gate=AlwaysOpen())
    for _, p in routed:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.report.step == 1
