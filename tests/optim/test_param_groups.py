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


def test_heads_inside_numbered_blocks_are_matrices():
    """BERT calls each layer's feed-forward projection ``output``."""
    attention = nn.ModuleDict({"output": nn.Linear(8, 8, bias=False)})
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(8, attention)])})
    assert "layers.0.attn.output.weight" in routes(model)["matrix"]


def test_convolutions_are_no_matrices():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(8, 8, 1), nn.Flatten(), nn.Linear(8, 4)
    )
    routed = routes(model)
    assert routed["matrix"] == ["4.weight"]
    assert set(routed["vector"]) == trainable(model) - {"4.weight"}


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
        GPT(), patterns={"*.qkv.weight": rows}, options={"matrix": {"momentum": 0.9}}
    )
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["h.1.attn.qkv.weight"]["row_blocks"] == 3
    assert "row_blocks" not in by_name["h.1.attn.proj.weight"]
    assert {by_name[f"h.1.attn.{part}.weight"]["momentum"] for part in ("qkv", "proj")} == {0.9}
    assert rows == {"kind": "matrix", "row_blocks": 3}
    assert len(CurvaDion(groups, threshold=0.3).param_groups) == len(groups) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"patterns": {"*": {"row_blocks": 3}}}, ValueError, "unknown kind None"),
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
    names = [f"layers.{i}.experts.{part}" for i in (0, 1) for part in ("gate_up_proj", "down_proj")]
    assert routes(model)["stack"] == names
    (stack,) = [g for g in param_groups(model) if g.get("stack_dims")]
    assert (stack["algorithm"], stack["stack_dims"]) == ("dion", 1)
    assert stack.get("input_first", False) == input_first
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
    model = nn.ModuleDict({"c_attn": Conv1D(24, 8), "fc": nn.Linear(8, 8)})
    blocks = {"c_attn.weight": {"kind": "matrix", "row_blocks": 3}}
    groups = param_groups(model, patterns=blocks)
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["c_attn.weight"]["input_first"] is True
    assert "input_first" not in by_name["fc.weight"]
    assert len(Dion(groups)._collective_plan().matrices) == 4  # query, key, value and fc


@pytest.mark.parametrize("shape", [(8, 256), (4, 32)])
def test_skinny_matrices_have_full_rank(shape):
    model = nn.ModuleDict({"lora": nn.Linear(*shape[::-1], bias=False), "fc": nn.Linear(16, 32)})
    optimizer = Dion(param_groups(model), rank_fraction=0.25)
    ranks = {m.parameter.name: m.shard.rank for m in optimizer._collective_plan().matrices}
    assert ranks == {"lora.weight": min(shape), "fc.weight": 4}


# ---------------------------------------------------------------- what may be matrices


class Strangers(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, shape in tensors.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def test_a_warning_names_large_tensors_left_to_adamw():
    blocks = [Strangers(w1=(4, 32, 16), w2=(4, 16, 32)) for _ in range(3)]
    model = nn.ModuleDict({"h": nn.ModuleList(blocks), "fc": nn.Linear(32, 32, bias=False)})
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
