"""AdamW over a list on every backend that runs in this process, against float64.

With TRITON_INTERPRET=1 that is the Triton kernel; test_triton.py runs it so.
"""

from __future__ import annotations

import math
from itertools import chain, product

import pytest
import torch

from curvadion import ops
from support.references import operations
from support.references.operations import INTERPRETED, SIZES, numbers, scalars, tensors
from support.runs.pairwise import all_pairs

F32, BF16 = operations.DTYPES
F16, F64 = torch.float16, torch.float64
NAMES = "lr", "weight_decay", "beta1", "beta2", "eps"
# The interpreter takes milliseconds a program.
CHOSEN = [name for name in SIZES if not (INTERPRETED and name == "many")]

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.parametrize(("backend", "device"), operations.places("torch")),
]


class Problem:
    """Weights, gradients and states of a list, and the number of steps so far.

    Args:
        shapes: of the tensors.
        X_dtypes, G_dtypes, m_dtypes, v_dtypes: in turn.
        device: of all; counters of a CPU stay there.
        aligned: whether addresses are multiples of 16 bytes.
        steps: taken before, by the first tensor; each other has taken one more.
    """

    def __init__(
        self, shapes, X_dtypes, G_dtypes, m_dtypes, v_dtypes, device, *, aligned=True, steps=0
    ):
        self.X = tensors(shapes, X_dtypes, device, 1, aligned=aligned)
        self.G = tensors(shapes, G_dtypes, device, 2, aligned=aligned)
        self.m = tensors(shapes, m_dtypes, device, 3, aligned=aligned)
        self.v = [v.abs_() for v in tensors(shapes, v_dtypes, device, 4, aligned=aligned)]
        if not steps:
            torch._foreach_zero_([*self.m, *self.v])
        self.t = [
            torch.tensor(float(steps + i * bool(steps)), device=device) for i in range(len(shapes))
        ]

    @property
    def written(self):
        return [*self.X, *self.m, *self.v, *self.t]

    def copies(self):
        return [t.clone() for t in self.written]

    def step(self, numbers, moves=None):
        each = [numbers[name] for name in NAMES]
        ops.adamw_(self.X, self.G, self.m, self.v, self.t, *each, moves)


def hyperparameters(count):
    """Others for each tensor; a few have equal ones."""
    ranges = {
        "lr": (0.02, 0.3),
        "weight_decay": (0.0, 0.9),
        "beta1": (0.5, 0.99),
        "beta2": (0.9, 0.9999),
        "eps": (1e-8, 0.1),
    }
    different = min(count, 7)
    return {
        name: (scalars(different, low, high) * count)[:count]
        for name, (low, high) in ranges.items()
    }


def stepped(x, g, m, v, t, *, lr, weight_decay, beta1, beta2, eps):
    """The equations, in float64."""
    x, g, m, v, t = (each.double().cpu() for each in (x, g, m, v, t))
    t = t + 1
    x = x * (1 - lr * weight_decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    x = x - lr / (1 - beta1**t) * m / (v.sqrt() / (1 - beta2**t).sqrt() + eps)
    return x, m, v, t


def check_step(problem, chosen, *, arithmetic=F32):
    """One step of every tensor, compared with the equations on what the tensors held before."""
    expected = [
        stepped(*each, **{name: chosen[name][i] for name in NAMES})
        for i, each in enumerate(
            zip(problem.X, problem.G, problem.m, problem.v, problem.t, strict=True)
        )
    ]
    gradients = [g.clone() for g in problem.G]
    problem.step(chosen)
    assert all(map(torch.equal, problem.G, gradients))
    for i, (x, m, v, t) in enumerate(expected):
        operations.assert_close(problem.X[i], x, arithmetic=arithmetic)
        operations.assert_close(problem.m[i], m, arithmetic=arithmetic)
        operations.assert_close(problem.v[i], v, arithmetic=arithmetic)
        assert problem.t[i].item() == t.item()


def arithmetic_of(backend, *dtypes):
    """In what a step adds: PyTorch's unfused one, of different dtypes, in any of them."""
    fuses = backend != "torch" or len({d for each in dtypes for d in each}) == 1
    return F32 if fuses else next((d for d in (BF16, F16) if d in chain(*dtypes)), F32)


@pytest.mark.parametrize(
    ("X_dtypes", "G_dtypes", "m_dtypes", "v_dtypes", "sizes", "aligned"),
    all_pairs(
        [[F32], [BF16], [BF16, F32]],
        [[F32], [BF16], [F16], [F16, BF16, F32]],
        [[F32], [BF16]],
        [[F32], [BF16]],
        CHOSEN,
        [True, False],
    ),
)
def test_steps(backend, device, X_dtypes, G_dtypes, m_dtypes, v_dtypes, sizes, aligned):
    dtypes = X_dtypes, G_dtypes, m_dtypes, v_dtypes
    chosen = hyperparameters(len(SIZES[sizes]))
    arithmetic = arithmetic_of(backend, *dtypes)
    with operations.backend(backend):
        for before, steps in ((0, 2), (5, 1)):
            problem = Problem(SIZES[sizes], *dtypes, device, aligned=aligned, steps=before)
            for _ in range(steps):
                check_step(problem, chosen, arithmetic=arithmetic)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equal_dtypes(backend, device, dtype):
    """Which PyTorch fuses, so that its steps too add in float32."""
    dtypes = [[dtype]] * 4
    with operations.backend(backend):
        for sizes in CHOSEN:
            problem = Problem(SIZES[sizes], *dtypes, device, aligned=False)
            check_step(problem, hyperparameters(len(SIZES[sizes])))


@pytest.mark.parametrize("steps", [0, 1, 1000, 10**7])
def test_bias_corrections_of_any_betas_and_step(backend, device, steps):
    pairs = [*product([0.0, 0.9, 0.999, 0.999999], repeat=2)]
    count = len(pairs)
    chosen = {"lr": [1.0] * count, "weight_decay": [0.0] * count, "eps": [1e-3] * count}
    chosen |= {"beta1": [beta1 for beta1, _ in pairs], "beta2": [beta2 for _, beta2 in pairs]}
    problem = Problem([(5,)] * count, [F32], [F32], [F32], [F32], device, steps=steps)
    with operations.backend(backend):
        check_step(problem, chosen)


def test_strides(backend, device):
    """Transposed tensors; gradients of other strides, expanded and transposed."""
    problem = Problem([(6, 8), (7, 5)], [F32], [F32], [F32], [F32], device, steps=2)
    for own in (problem.X, problem.m, problem.v):
        own[:] = [own[0].mT, own[1]]
    problem.G = [
        numbers((8, 6), F32, device, 9),
        torch.full((1, 1), 0.5, device=device).expand(7, 5),
    ]
    with operations.backend(backend):
        check_step(problem, hyperparameters(2))


def test_a_root_of_tiny_squares_without_eps(backend, device):
    """A gradient of 1e-20 has a square that only denormal numbers hold."""
    chosen = {name: [value] for name, value in zip(NAMES, (0.1, 0.0, 0.9, 0.9, 0.0), strict=True)}
    problem = Problem([(40,)], [F32], [F32], [F32], [F32], device)
    problem.G = [torch.full((40,), 1e-19, device=device)]
    before = problem.X[0].clone()
    with operations.backend(backend):
        problem.step(chosen)
    # m / sqrt(v) is the sign of the first gradient, up to the few bits of a denormal number.
    assert ((before - problem.X[0]) - 0.1).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_flag_on_the_device_calls_the_step_off(backend, device, dtype):
    """Whatever the gradients are; where it is true, it changes nothing."""
    for sizes in CHOSEN[1:3]:
        chosen = hyperparameters(len(SIZES[sizes]))
        found, wanted = (
            Problem(SIZES[sizes], [dtype, F32], [F32], [dtype], [F32], device, steps=4)
            for _ in range(2)
        )
        gradients = found.G
        with operations.backend(backend):
            for bad in (math.nan, math.inf):
                before = found.copies()
                found.G = [torch.full_like(g, bad) for g in gradients]
                found.step(chosen, torch.tensor(False, device=device))
                assert all(map(torch.equal, found.written, before))
            found.G = gradients
            found.step(chosen, torch.tensor(True, device=device))
            wanted.step(chosen)
        assert all(map(torch.equal, found.written, wanted.written))


def test_a_rate_that_is_a_tensor(backend, device):
    problem = Problem([(6, 8), (5,)], [F32], [F32], [F32], [F32], device, steps=2)
    wanted = Problem([(6, 8), (5,)], [F32], [F32], [F32], [F32], device, steps=2)
    chosen = hyperparameters(2)
    rates = [torch.tensor(rate, dtype=F64, device=device) for rate in chosen["lr"]]
    with operations.backend(backend):
        wanted.step(chosen)
        problem.step({**chosen, "lr": rates})
    for now, then in zip(problem.written, wanted.written, strict=True):
        operations.assert_close(now, then)


def test_autograd_notices(backend, device):
    if backend == "torch":
        pytest.skip("PyTorch's fused step tells autograd nothing")
    problem = Problem([(6, 8)], [F32], [F32], [F32], [F32], device)
    versions = [t._version for t in problem.written]
    with operations.backend(backend):
        problem.step(hyperparameters(1))
    assert all(t._version > v for t, v in zip(problem.written, versions, strict=True))
