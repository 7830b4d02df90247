"""Which parameter of which model goes where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvadion import CurvaDion, Dion, param_groups
from support.references.tolerance import Rounding, assert_close
from support.runs.seeded import gradient

KINDS = ("matrix", "stack", "embedding", "head", "vector")


def routes(model, **arguments):
    """Names by kind; every kind is told apart by a learning rate of its own."""
    options = {kind: {"lr": float(i)} for i, kind in enumerate(KINDS)}
    routed: dict[str, list[str]] = {}
    for group in param_groups(model, options=options, **arguments):
        routed.setdefault(KINDS[int(group["lr"])], []).extend(name for name, _ in group["params"])
    return routed


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
        self.mix = nn.Linear(width, 3 * width, bias=False)
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
    parts = ("attn.mix", "attn.proj", "mlp.0", "mlp.2")
    return [f"h.{layer}.{part}.weight" for layer in range(layers) for part in parts]


def test_gpt():
    routed = routes(GPT())
    assert routed["matrix"] == block_matrices()
    assert routed["embedding"] == ["wte.weight", "wpe.weight"]
    assert routed["head"] == ["lm_head.weight"]
    assert set(routed["vector"]) == trainable(GPT()) - {
        name for kind in ("matrix", "embedding", "head") for name in routed[kind]
    }


def test_tied_gpt_has_one_head_and_no_second_name_for_it():
    routed = routes(GPT(tied=True))
    assert routed["head"] == ["wte.weight"]
    assert routed["embedding"] == ["wpe.weight"]
    assert routed["matrix"] == block_matrices()


@pytest.mark.parametrize("name", ["lm_head", "output"])
def test_output_heads_by_name(name):
    parts = {"positions": nn.Embedding(5, 5), "body": nn.Linear(4, 5), name: nn.Linear(5, 3)}
    routed = routes(nn.ModuleDict(parts))
    assert routed == {
        "embedding": ["positions.weight"],
        "matrix": ["body.weight"],
        "head": [f"{name}.weight"],
        "vector": ["body.bias", f"{name}.bias"],
    }


def test_layers_as_wide_as_the_vocabulary_are_no_heads():
    """But the last one is, and so are several where no layer has such inputs."""
    layers = [nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)]
    routed = routes(nn.Sequential(*layers))
    assert routed["matrix"] == ["1.weight", "2.weight"]
    assert routed["head"] == ["3.weight"]
    parts = {"tokens": nn.Embedding(16, 8), "a": nn.Linear(8, 16), "b": nn.Linear(8, 16)}
    assert routes(nn.ModuleDict(parts))["head"] == ["a.weight", "b.weight"]
    # The MLPs of blocks may be as wide.
    blocks = nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(16, 16), "down": nn.Linear(16, 8)})])
    early = {"tokens": nn.Embedding(16, 8), "to_logits": nn.Linear(8, 16), "blocks": blocks}
    assert routes(nn.ModuleDict(early))["head"] == ["to_logits.weight"]
    # What leads into blocks of that width is a matrix.
    wide = [nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in range(2)]
    parts = {"tokens": nn.Embedding(16, 8), "into": nn.Linear(8, 16), "layers": nn.ModuleList(wide)}
    assert "into.weight" in routes(nn.ModuleDict(parts))["matrix"]


def test_a_model_without_linear_layers():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 16))

    assert routes(nn.Sequential(nn.Embedding(16, 8), Conv1D()))["matrix"] == ["1.weight"]


def test_heads_inside_numbered_blocks_are_matrices():
    """BERT calls each layer's feed-forward projection ``output``."""
    attention = nn.ModuleDict({"output": nn.Linear(8, 8, bias=False)})
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(8, attention)])})
    assert "layers.0.attn.output.weight" in routes(model)["matrix"]


def test_convolutions_are_no_matrices():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(8, 8, 1), nn.Flatten(), nn.Linear(8, 4)
    )
    with pytest.warns(UserWarning, match=r"adamw 2 convolutions, 80% of .*'2\.weight': 'matrix'"):
        routed = routes(model)
    assert routed["matrix"] == ["4.weight"]
    assert set(routed["vector"]) == trainable(model) - {"4.weight"}
    routed = routes(model, patterns={"0.weight": "vector", "2.weight": "matrix"})  # and no warning
    assert routed["matrix"] == ["2.weight", "4.weight"]


# ---------------------------------------------------------------- patterns and options


def test_patterns_overrule_the_rules():
    routed = routes(GPT(), patterns={"*.attn.proj.weight": "vector", "lm_head.weight": "matrix"})
    assert routed["matrix"] == [n for n in block_matrices() if "proj" not in n] + ["lm_head.weight"]
    assert {"h.0.attn.proj.weight", "h.1.attn.proj.weight"} < set(routed["vector"])
    assert "head" not in routed


def test_groups_hold_algorithms_names_and_options():
    model = GPT()
    groups = param_groups(
        model,
        elementwise="lion",
        options={"matrix": {"lr": 0.1, "momentum": 0.9}, "head": {"weight_decay": 0.2}},
    )
    by_name = {name: (p, group) for group in groups for name, p in group["params"]}
    assert all(by_name[name][0] is p for name, p in model.named_parameters())
    matrix = by_name["h.0.mlp.0.weight"][1]
    assert (matrix["algorithm"], matrix["lr"], matrix["momentum"]) == ("dion", 0.1, 0.9)
    assert "weight_decay" not in matrix
    assert by_name["lm_head.weight"][1]["weight_decay"] == 0.2
    assert by_name["wte.weight"][1]["weight_decay"] == 0.0
    for name in ("wte.weight", "lm_head.weight", "norm.bias"):
        assert by_name[name][1]["algorithm"] == "lion"


def test_a_pattern_may_give_group_keys():
    rows = {"kind": "matrix", "row_blocks": 3}
    groups = param_groups(
        GPT(), patterns={"*.mix.weight": rows}, options={"matrix": {"momentum": 0.9}}
    )
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["h.1.attn.mix.weight"]["row_blocks"] == 3
    assert "row_blocks" not in by_name["h.1.attn.proj.weight"]
    assert {by_name[f"h.1.attn.{part}.weight"]["momentum"] for part in ("mix", "proj")} == {0.9}
    assert rows == {"kind": "matrix", "row_blocks": 3}
    assert len(CurvaDion(groups, threshold=0.3).param_groups) == len(groups) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"patterns": {"*": {"row_blocks": 2}}},
            ValueError,
            r"patterns\['\*'\] gives row_blocks to wte\.weight, which is a 'embedding'",
        ),
        ({"patterns": {"*": {"kind": None}}}, ValueError, "unknown kind None"),
        ({"heads": 16}, TypeError, "heads=16"),
        ({"heads": True}, ValueError, r"heads=True, but no attention.*\*\.o_proj\.weight"),
        (
            {"patterns": {"*": {"kind": "experts"}}},
            ValueError,
            "unknown kind 'experts': it must be one of",
        ),
        ({"options": {"matrix": 3}}, TypeError, r"options\['matrix'\]=3"),
        ({"options": {"matrices": {"lr": 1.0}}}, ValueError, "options.*'matrices'.*matrix"),
        ({"elementwise": "sgd"}, ValueError, "elementwise='sgd'"),
        ({"patterns": {"*.router.weight": "vector"}}, ValueError, r"\*\.router\.weight.*h\.0"),
        ({"patterns": {"norm.bias": "matrix"}}, ValueError, r"norm\.bias.*\(8,\).*matrix"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        param_groups(GPT(), **arguments)


def test_a_pattern_without_a_kind_keeps_it():
    patterns = {"wte.*": {"lr_ratio": 0.3}, "*.mix.*": {"momentum": 0.8}}
    by_name = {
        name: group
        for group in param_groups(GPT(), patterns=patterns)
        for name, _ in group["params"]
    }
    embedding, matrix = by_name["wte.weight"], by_name["h.0.attn.mix.weight"]
    assert (embedding["algorithm"], embedding["lr_ratio"]) == ("adamw", 0.3)
    assert (matrix["algorithm"], matrix["momentum"]) == ("dion", 0.8)
    assert by_name["wpe.weight"]["lr_ratio"] == 0.5


def test_options_of_matrices_are_also_those_of_stacks():
    options = {"matrix": {"momentum": 0.9, "lr": 0.1, "row_blocks": 1}, "stack": {"lr_ratio": 2.0}}
    of_stacks = [g for g in param_groups(MoE(), options=options) if g.get("stack_dims")]
    assert [g["momentum"] for g in of_stacks] == [0.9, 0.9]
    assert all("lr" not in g and g["lr_ratio"] == 2.0 for g in of_stacks)
    assert {g.get("row_blocks") for g in of_stacks} == {None, 2}


# ---------------------------------------------------------------- learning rates


@pytest.mark.parametrize(
    ("elementwise", "expected"),
    [("adamw", (1e-2, 3e-3, 1e-2)), ("lion", (3e-3, 1e-3, 3e-3))],
)
def test_each_kind_has_a_rate_that_follows_lr(elementwise, expected, capsys):
    groups = param_groups(GPT(), elementwise=elementwise, verbose=True)
    assert "'lr_ratio': " in capsys.readouterr().out
    assert rates(Dion(groups)) == (0.02, *expected)
    # The same groups may be given to another optimizer.
    fine_tuned = rates(Dion(groups, lr=2e-5))
    assert fine_tuned == pytest.approx((2e-5, *(rate / 1000 for rate in expected)))
    of_tensor = Dion(groups, lr=torch.tensor(2e-5)).param_groups
    assert [float(group["lr"]) for group in of_tensor] == pytest.approx(fine_tuned)


def rates(optimizer):
    return tuple(group["lr"] for group in optimizer.param_groups)


def test_a_rate_that_is_given_does_not_follow_lr():
    def given(**arguments):
        return rates(Dion(param_groups(GPT(), **arguments), lr=0.1))

    assert given(elementwise_lr=0.3) == (0.1, 0.3, 0.3, 0.3)
    ratio = {"head": {"lr_ratio": 2.0}, "vector": {"lr": 0.4}}
    assert given(options=ratio) == (0.1, 0.05, 0.2, 0.4)
    assert given(options=ratio, elementwise_lr=0.3) == (0.1, 0.3, 0.2, 0.4)
    groups = [{**group, "lr": 0.7} for group in param_groups(GPT())]
    assert rates(CurvaDion(groups, threshold=0.3)) == (0.7,) * 4


def test_wrong_ratios_are_errors():
    with pytest.raises(ValueError, match=r"lr_ratio=-1\.0 must be in"):
        Dion(param_groups(GPT(), options={"head": {"lr_ratio": -1.0}}))
    with pytest.raises(ValueError, match="lr_rate=0.1: did you mean 'lr_ratio'"):
        Dion([{"params": list(GPT().parameters())[-1:], "lr_rate": 0.1}])
    optimizer = Dion(param_groups(GPT()))
    optimizer.param_groups[2]["lr_ratio"] = 0.1
    with pytest.raises(ValueError, match=r"param_groups\[2\]: lr_ratio=0\.1 has no effect.*lr"):
        optimizer.step()


# ---------------------------------------------------------------- stacks, Conv1D, LoRA


class Experts(nn.Module):
    """transformers' MixtralExperts and Qwen3MoeExperts, or, input first, Llama4TextExperts."""

    def __init__(self, experts=4, width=24, hidden=20, *, input_first=False):
        super().__init__()
        up, down = (experts, 2 * hidden, width), (experts, width, hidden)
        if input_first:
            up, down = (experts, width, 2 * hidden), (experts, hidden, width)
        self.gate_up_proj = nn.Parameter(torch.randn(up))
        self.down_proj = nn.Parameter(torch.randn(down))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * hidden))


class MoE(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(24, 4, bias=False), "experts": Experts(**sizes)})
            for _ in range(2)
        )


# The second has 2 hidden = width, as OLMoE does: gate_up_proj is square.
@pytest.mark.numeric
@pytest.mark.parametrize(("hidden", "input_first"), [(20, False), (12, True)])
def test_experts_of_transformers_are_stacks(hidden, input_first):
    model = MoE(input_first=input_first, hidden=hidden)
    names = [f"layers.{i}.experts.{part}" for part in ("down_proj", "gate_up_proj") for i in (0, 1)]
    assert sorted(routes(model)["stack"]) == sorted(names)
    stack, halves = sorted(
        (g for g in param_groups(model) if g.get("stack_dims")),
        key=lambda g: g.get("row_blocks", 1),
    )
    assert [name for name, _ in halves["params"]] == names[2:]
    assert (stack["algorithm"], stack["stack_dims"]) == ("dion", 1)
    assert stack.get("input_first", False) == halves.get("input_first", False) == input_first
    assert "lr" not in stack
    optimizer = Dion([stack], lr=1.0, weight_decay=0.0, rank_fraction=1.0, right_factor="qr")
    X = model.layers[0].experts.down_proj
    before = X.detach().clone()
    for p in model.parameters():
        p.grad = gradient(tuple(p.shape), 0, 0)
    optimizer.step()
    moved = torch.linalg.matrix_norm(X.detach() - before, 2)
    wanted = torch.full((4,), (24 / hidden) ** 0.5)
    assert_close(moved, wanted, Rounding(torch.float32, terms=24), elementwise=True)


class Conv1D(nn.Module):
    """As transformers has it: GPT-2's linear layer, with its weight as (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


def test_conv1d_has_its_inputs_first():
    model = nn.ModuleDict({"c_attn": Conv1D(24, 8), "up": nn.Linear(8, 8)})
    blocks = {"c_attn.weight": {"kind": "matrix", "row_blocks": 3}}
    groups = param_groups(model, patterns=blocks)
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["c_attn.weight"]["input_first"] is True
    assert "input_first" not in by_name["up.weight"]
    assert len(Dion(groups)._collective_plan().matrices) == 4  # query, key, value and up


@pytest.mark.parametrize("shape", [(8, 256), (4, 32)])
def test_skinny_matrices_have_full_rank(shape):
    model = nn.ModuleDict({"lora": nn.Linear(*shape[::-1], bias=False), "up": nn.Linear(16, 32)})
    optimizer = Dion(param_groups(model), rank_fraction=0.25)
    ranks = {m.parameter.name: m.shard.rank for m in optimizer._collective_plan().matrices}
    assert ranks == {"lora.weight": min(shape), "up.weight": 4}


def test_routers_take_adamw(capsys):
    routed = routes(MoE(), verbose=True)
    assert {"layers.0.gate.weight", "layers.1.gate.weight"} < set(routed["vector"])
    assert "layers.*.gate.weight: router, adamw" in capsys.readouterr().out
    gates = nn.ModuleDict({"gate": nn.Linear(8, 8, bias=False), "up": nn.Linear(8, 8, bias=False)})
    assert routes(gates) == {"matrix": ["gate.weight", "up.weight"]}  # of no experts


def test_the_last_linear_layer_may_be_a_head_by_name():
    """As of torchvision's ResNet and VGG."""
    resnet = nn.ModuleDict(
        {"layer": nn.Linear(4, 4, bias=False), "fc": nn.Linear(4, 3, bias=False)}
    )
    assert routes(resnet)["head"] == ["fc.weight"]
    parts = [nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)]
    vgg = nn.ModuleDict({"classifier": nn.Sequential(*parts)})
    assert routes(vgg) == {"matrix": ["classifier.0.weight"], "head": ["classifier.2.weight"]}
    blocks = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(4, 4, bias=False)})])
    assert routes(blocks) == {"matrix": ["0.fc.weight"]}


# ---------------------------------------------------------------- fused projections and heads


class Attention(nn.Module):
    """Q, K and V fused under a name, and an output projection; numbers of heads as given."""

    def __init__(self, name, rows, width=16, inner=16, **numbers):
        super().__init__()
        for key, number in numbers.items():
            setattr(self, key, number)
        setattr(self, name, nn.Linear(width, rows, bias=False))
        self.o_proj = nn.Linear(inner, width, bias=False)


def blocks(model, **arguments):
    """By layer its row blocks and column blocks; only of weights that are divided."""
    found = {}
    for group in param_groups(model, **arguments):
        divided = (group.get("row_blocks", 1), group.get("column_blocks", 1))
        if divided != (1, 1):
            found.update({name.removesuffix(".weight"): divided for name, _ in group["params"]})
    return found


@pytest.mark.parametrize(
    ("model", "whole", "by_head"),
    [
        (Attention("qkv", 48), {"qkv": (3, 1)}, None),
        (Attention("Wqkv", 48, n_head=4), {"Wqkv": (3, 1)}, {"Wqkv": (12, 1), "o_proj": (1, 4)}),
        (
            Attention("qkv_proj", 40, num_heads=4, num_key_value_heads=2, inner=20),
            {"qkv_proj": ([20, 10, 10], 1)},
            {"qkv_proj": (8, 1), "o_proj": (1, 4)},
        ),
        # The heads of keys follow from the size of a head.
        (
            Attention("qkv", 24, num_heads=4, head_dim=4),
            {"qkv": ([16, 4, 4], 1)},
            {"qkv": (6, 1), "o_proj": (1, 4)},
        ),
        # Q, K and V of one head after another: no blocks, unless each head is one.
        (
            Attention("query_key_value", 48, num_heads=4, head_size=4),
            {},
            {"query_key_value": (12, 1), "o_proj": (1, 4)},
        ),
    ],
)  # fmt: skip
def test_fused_projections_are_several_matrices(model, whole, by_head):
    assert blocks(model) == whole
    if by_head is not None:
        assert blocks(model, heads=True) == by_head


def test_a_layer_beside_a_whole_attention_is_no_output_projection():
    layer = nn.Module()
    layer.num_heads = 4
    layer.attention = Attention("qkv", 48, num_heads=4)
    layer.dense = nn.Linear(64, 16, bias=False)
    layer.output = nn.Module()
    layer.output.dense = nn.Linear(64, 16, bias=False)
    divided = {"attention.qkv": (12, 1), "attention.o_proj": (1, 4)}
    assert blocks(layer, heads=True) == divided


def test_torchs_attention_is_divided():
    attention = nn.MultiheadAttention(16, 4)
    assert blocks(attention) == {"in_proj_weight": (3, 1)}
    of_heads = {"in_proj_weight": (12, 1), "out_proj": (1, 4)}
    assert blocks(attention, heads=True) == of_heads
    other = nn.MultiheadAttention(16, 4, kdim=8, vdim=8)
    assert blocks(other) == {}
    separate = {f"{part}_proj_weight": (4, 1) for part in "qkv"}
    assert blocks(other, heads=True) == {**separate, "out_proj": (1, 4)}


@pytest.mark.parametrize(
    ("rows", "numbers", "doubt"),
    [
        (40, {}, "40 rows do not fit None heads of queries"),
        (40, {"num_heads": 4}, "40 rows do not fit 4 heads"),
        (
            40,
            {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
            "4 heads of queries, 2 of keys, of size 4",
        ),
        # K and V of 4 heads, or 4 heads of queries and 2 of keys.
        (32, {"num_heads": 4, "head_dim": 4}, "32 rows do not fit 4 heads"),
        # Perhaps the numbers of a language model around a vision tower.
        (48, {"num_heads": 4, "num_key_value_heads": 2}, "48 rows do not fit 4 heads"),
    ],
)
def test_what_cannot_be_told_apart_stays_whole_with_a_warning(rows, numbers, doubt):
    model = nn.ModuleList([Attention("qkv_proj", rows, **numbers)])
    with pytest.warns(UserWarning, match=doubt) as warned:
        assert blocks(model) == {}
    assert "patterns={'*.qkv_proj.weight': {'row_blocks': [q, k, v]}}" in str(warned[0].message)
    sizes = [rows - 20, 10, 10]
    divided = {"*.qkv_proj.weight": {"row_blocks": sizes}}
    assert blocks(model, patterns=divided) == {"0.qkv_proj": (sizes, 1)}  # and no warning
    assert blocks(model, patterns={"*.qkv_proj.weight": {"row_blocks": 1}}) == {}


class Gated(nn.Module):
    def __init__(self, name, inner, down="down_proj"):
        super().__init__()
        setattr(self, name, nn.Linear(8, 24, bias=False))
        setattr(self, down, nn.Linear(inner, 8, bias=False))


def test_gates_are_divided_where_the_next_layer_says_so():
    for name in ("gate_up_proj", "w13", "wi"):
        assert blocks(Gated(name, 12)) == {name: (2, 1)}
    assert blocks(Gated("wi", 24, "wo")) == {}  # without a gate
    with_shortcut = Gated("wi", 24, "wo")
    with_shortcut.shortcut = nn.Linear(12, 8, bias=False)
    assert blocks(with_shortcut) == {}
    with pytest.warns(UserWarning, match=r"no layer beside it has 12 inputs.*\{'row_blocks': 2\}"):
        assert blocks(Gated("gate_up_proj", 24)) == {}


def test_a_gate_that_takes_turns_with_its_other_half_is_divided():
    """As torchtitan stores w13, (hidden, 2, dim)."""
    model = nn.Module()
    model.w13 = nn.Parameter(torch.randn(12, 2, 8))
    model.w2 = nn.Linear(12, 8, bias=False)
    assert blocks(model) == {"w13": (1, 2)}
    assert routes(model) == {"matrix": ["w2.weight", "w13"]}
    del model.w2
    assert routes(model) == {"vector": ["w13"]}


def test_titans_attention_and_experts():
    """Its fused layer has the queries of a group of heads, and then their key and value."""

    class FusedQKVLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.head_dim = 4
            self.wqkv = nn.Linear(16, 48, bias=False)

    attention = nn.Module()
    attention.n_heads, attention.n_kv_heads, attention.head_dim = 4, 4, 4
    attention.qkv_linear = FusedQKVLinear()
    attention.wo = nn.Linear(16, 16, bias=False)
    assert blocks(attention) == {}
    assert blocks(attention, heads=True) == {"qkv_linear.wqkv": (12, 1), "wo": (1, 4)}
    experts = Strangers(w1_EFD=(4, 32, 16), w2_EDF=(4, 16, 32), w3_EFD=(4, 32, 16))
    assert routes(experts) == {"stack": ["w1_EFD", "w2_EDF", "w3_EFD"]}


def test_gates_whose_rows_alternate_stay_one_matrix():
    model = MoE()
    for layer in model.layers:
        layer["experts"].is_concatenated = False  # as of transformers' GPT-OSS
    assert blocks(model) == {}


def test_a_pattern_overrides_what_is_found():
    model = nn.ModuleList([Attention("qkv", 48, num_heads=4)])
    patterns = {"*.o_proj.weight": {"column_blocks": [4, 12]}, "*.qkv.weight": {"lr": 0.1}}
    wanted = {"0.qkv": (12, 1), "0.o_proj": (1, [4, 12])}
    assert blocks(model, heads=True, patterns=patterns) == wanted
    others = {"*.qkv.weight": "vector", "*.o_proj.weight": {"row_blocks": 2}}
    assert blocks(model, patterns=others) == {"0.o_proj": (2, 1)}


@pytest.mark.numeric
def test_each_head_moves_as_a_matrix_of_its_own():
    """A step without momentum moves each head by its polar factor."""
    torch.manual_seed(0)
    model = nn.ModuleList([Attention("qkv", 48, num_heads=4)]).double()
    X = {"qkv": model[0].qkv.weight, "o_proj": model[0].o_proj.weight}
    before = {name: x.detach().clone() for name, x in X.items()}
    for name, x in X.items():
        x.grad = gradient(tuple(x.shape), 0, 0, seed=name).double()
    groups = param_groups(model, heads=True)
    options = {"direction": "polar", "newton_schulz_steps": 14, "update_scale": "original"}
    Dion(groups, lr=1.0, weight_decay=0.0, replicas="single", **options).step()
    for name, dim in (("qkv", 0), ("o_proj", 1)):
        moved = (before[name] - X[name].detach()).split(4, dim)
        for step, G in zip(moved, X[name].grad.split(4, dim), strict=True):
            U, _, Vh = torch.linalg.svd(G, full_matrices=False)
            m, n = G.shape
            wanted = max(1.0, m / n) ** 0.5 * (U @ Vh)
            assert_close(step, wanted, Rounding(torch.float64, terms=16, condition=1e4))


# ---------------------------------------------------------------- what may be matrices


class Strangers(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, shape in tensors.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def test_a_warning_names_large_tensors_left_to_adamw():
    blocks = [Strangers(w1=(4, 32, 16), w2=(4, 16, 32)) for _ in range(3)]
    model = nn.ModuleDict({"h": nn.ModuleList(blocks), "up": nn.Linear(32, 32, bias=False)})
    with pytest.warns(UserWarning) as warned:
        param_groups(model)
    (warning,) = warned
    assert warning.filename == __file__
    message = str(warning.message)
    assert "assigns to adamw 6 tensors that may be matrices" in message
    assert "'h.0.w1' of shape (4, 32, 16)" in message
    assert "patterns={'h.*.w1': 'stack'}" in message
    routed = routes(model, patterns={"h.*.w1": "stack", "h.*.w2": "vector"})  # and no warning
    assert routed["stack"] == [f"h.{i}.w1" for i in range(3)]


def test_every_trainable_parameter_is_routed_once():
    """Of modules that stand in several places, tied weights and frozen ones."""
    shared = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "norm": nn.LayerNorm(4)})
    parts = [nn.Embedding(5, 4), shared, nn.LSTM(4, 2), nn.Bilinear(2, 3, 4), shared]
    model = nn.ModuleList([*parts, nn.Linear(4, 5), nn.Linear(4, 4)])
    model[-2].weight = model[0].weight
    model[-1].weight.requires_grad_(False)
    groups = param_groups(model)
    routed = [(name, id(p)) for group in groups for name, p in group["params"]]
    expected = [(n, id(p)) for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(routed) == sorted(expected)
    with pytest.raises(ValueError, match="no trainable parameters"):
        param_groups(model.requires_grad_(False))
