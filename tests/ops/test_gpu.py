"""On an NVIDIA GPU: launches, host reads, CUDA graphs, the optimizer.

test_ops.py and test_codes.py compare numbers there.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from curvadion import CurvaDion, Dion, FixedPeriod, ops
from curvadion.layout import exchange
from curvadion.layout.dtensor import local
from curvadion.ops.backends import refused
from curvadion.update import polar
from curvadion.update.inner_step import InnerStep
from support.references import operations
from support.references.reference import DionReference
from support.references.tolerance import Rounding, assert_close
from support.runs.shards import shard

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.numeric
F32, F16 = torch.float32, torch.float16
GPU = torch.device("cuda", torch.cuda.current_device())

BACKENDS = [name for name in ("torch", "triton", "cuda") if ops.lacking(name) is None]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
TABLES = "Memcpy HtoD (Pinned -> Device)"  # addresses and numbers of a list
compiled_backends = pytest.mark.parametrize("backend", BACKENDS[1:])


@each_backend
def test_more_elements_than_32_bits_count(backend):
    size = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 5 * size:
        pytest.skip("too little memory")
    M = torch.zeros(size, dtype=torch.bfloat16, device=GPU)
    G = torch.zeros(size, dtype=torch.bfloat16, device=GPU)
    G[-1], G[2**31 + 5], G[0] = 2.0, 3.0, 6.0
    with ops.use_backend(backend):
        assert ops.momentum_norms([M], [G], [1.0]).item() == 7.0
        assert M.count_nonzero() == 0
        ops.accumulate_([M], [G], [1.0], moves=None)
    assert M[-1] == 2.0 and M[2**31 + 5] == 3.0 and M[0] == 6.0
    assert M.count_nonzero() == 3


# ---------------------------------------------------------------- launches, reads, graphs


def kernels_of(call):
    """Names of the kernels that a call launches, and of its copies."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events]


@compiled_backends
def test_one_launch_an_operation(backend):
    shapes = [(64 + i % 7, 32) for i in range(300)]
    M, G, X = (operations.tensors(shapes, [F32], GPU, i) for i in range(3))
    ones = [1.0] * len(M)
    calls = {
        "norms": lambda: ops.norms(X),
        "momentum_norms": lambda: ops.momentum_norms(M, G, ones),
        "accumulate_": lambda: ops.accumulate_(M, G, ones, moves=None),
        "local_step_": lambda: ops.local_step_(X, G, ones, ones, M, ones, moves=None),
    }
    with ops.use_backend(backend):
        for name, call in calls.items():
            launched = [k for k in kernels_of(call) if k != TABLES]
            assert len(launched) == 1, (name, launched)


def test_one_launch_for_low_rank_updates_of_all_shapes():
    shapes = [(128, 64, 16), (256, 64, 8), (64, 64, 64)] * 5
    X, M = (operations.tensors([s[:2] for s in shapes], [F32], GPU, i) for i in range(2))
    P = operations.tensors([(m, r) for m, _, r in shapes], [F32], GPU, 3)
    Q = operations.tensors([(n, r) for _, n, r in shapes], [F32], GPU, 4)
    ones = [1.0] * len(X)
    with ops.use_backend("triton"):
        names = kernels_of(
            lambda: ops.low_rank_update_(X, P, Q, ones, ones, M, Q, ones, moves=None)
        )
    assert len([name for name in names if not name.startswith("Memcpy")]) == 1
    assert not any("DtoH" in name for name in names)


@compiled_backends
def test_cuda_graphs_hold_the_operations(backend):
    shapes = [(1000,), (128, 65), (0,), (70_001,)]
    G = operations.tensors(shapes, [F32], GPU, 0)
    step, decay, mu = [0.1] * 4, [0.99] * 4, [0.9] * 4

    def work(M, X):
        norms = ops.momentum_norms(M, G, mu)
        ops.local_step_(X, G, step, decay, M, mu, moves=None)
        return norms

    with ops.use_backend(backend):
        # Two graphs, captured on one stream after a warm-up on another.
        lists = [
            [operations.tensors(shapes, [F32], GPU, i) for i in pair] for pair in ((1, 2), (3, 4))
        ]
        expected = [[[t.clone() for t in list_] for list_ in pair] for pair in lists]
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # compiles kernels, away from the tensors that count
            work(*([t.clone() for t in list_] for list_ in lists[0]))
        torch.cuda.current_stream().wait_stream(side)
        graphs, norms = [torch.cuda.CUDAGraph() for _ in lists], []
        for graph, (M, X) in zip(graphs, lists, strict=True):
            with torch.cuda.graph(graph):
                norms.append(work(M, X))
        junk = [torch.full((1 << 20,), 7, dtype=torch.int64).pin_memory() for _ in range(4)]
        for _ in range(3):
            for i in (1, 0):  # not in the order of their capture
                graphs[i].replay()
                wanted = work(*expected[i])
                torch.cuda.synchronize()
                assert_close(norms[i], wanted, Rounding(F32, terms=64))
        del junk
    for pair, wanted in zip(lists, expected, strict=True):
        for actual, one in zip([*pair[0], *pair[1]], [*wanted[0], *wanted[1]], strict=True):
            assert_close(actual, one, Rounding(F32, steps=3))


# ---------------------------------------------------------------- the optimizer


@each_backend
@pytest.mark.parametrize("local_step", ["dion", "gradient"])
@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (129, 37)])
def test_the_optimizer_follows_the_equations(backend, local_step, shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    X = torch.nn.Parameter(start.to(GPU))
    options = {"lr": 0.02, "local_step": local_step, "local_lr": 0.01}
    r = -(-min(shape) // 4)
    reference = DionReference(start, 1, r, **options)
    with ops.use_backend(backend):
        optimizer = CurvaDion([X], rank_fraction=0.25, gate=FixedPeriod(3), **options)
        for _ in range(9):
            G = torch.randn(shape, generator=generator)
            X.grad = G.to(GPU)
            optimizer.step()
            reference.step([G], optimizer.report.gate_open)
    rounding = Rounding(F32, terms=max(shape), steps=9)
    assert_close(X, reference.X[0], rounding)
    assert_close(optimizer.state[X]["momentum"], reference.M[0], rounding)


@each_backend
def test_a_step_reads_the_device_once(backend):
    parameters = [torch.nn.Parameter(torch.randn(64, 32 + i, device=GPU)) for i in range(8)]
    with ops.use_backend(backend):
        optimizer = CurvaDion(parameters, gate=FixedPeriod(50), local_step="gradient")
        for p in parameters:
            p.grad = torch.randn_like(p)
        names = kernels_of(optimizer.step)
    reads = [name for name in names if name.startswith("Memcpy DtoH")]
    assert len(reads) == 1


# ---------------------------------------------------------------- polar directions

POLAR_SHAPES = [(256, 128), (96, 300), (130, 130), (1, 40)] * 2


def polar_optimizer(device, X0):
    X = [torch.nn.Parameter(x.to(device, copy=True)) for x in X0]
    return X, Dion(X, direction="polar", look_ahead=1.0)


def test_polar_steps_are_those_of_the_cpu(monkeypatch):
    for module in (polar, exchange):  # as on a GPU: other polynomials, in passes
        monkeypatch.setattr(module, "dtype_of_products", lambda rows: F16)
    torch.manual_seed(0)
    X0 = [torch.randn(shape) for shape in POLAR_SHAPES]
    (ours, gpu), (theirs, cpu) = (polar_optimizer(device, X0) for device in (GPU, "cpu"))
    for _ in range(5):
        for x, y in zip(ours, theirs, strict=True):
            y.grad = torch.randn_like(y)
            x.grad = y.grad.to(GPU)
        gpu.step()
        cpu.step()
    for x, y, x0 in zip(ours, theirs, X0, strict=True):
        moved = (y.detach() - x0).norm()
        assert_close(x, y, Rounding(F16, terms=5), scale=float(moved))


def test_a_polar_step_can_be_captured():
    torch.manual_seed(0)
    X, optimizer = polar_optimizer(GPU, [torch.randn(shape) for shape in POLAR_SHAPES])
    for x in X:
        x.grad = torch.randn_like(x)
    for _ in range(2):
        optimizer.step()  # compiles kernels
    plan = optimizer._collective_plan()
    before = [x.detach().clone() for x in X]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in InnerStep(plan, plan.step_tensors(), 2).batches():
            pass
    assert all(x.detach().equal(b) for x, b in zip(X, before, strict=True))
    graph.replay()
    torch.cuda.synchronize()
    assert not any(x.detach().equal(b) for x, b in zip(X, before, strict=True))


# ---------------------------------------------------------------- captured steps


def captured_run(direction, capture, placed=lambda x: x):
    """Weights and states after twenty steps, and which of them were replayed.

    placed: makes of a matrix what is trained.
    """
    torch.manual_seed(0)
    shapes = [(512, 256), (256, 512), (256, 256), (768, 256)]
    X = [torch.nn.Parameter(placed(0.02 * torch.randn(s, device=GPU))) for s in shapes]
    rest = [torch.nn.Parameter(torch.randn(300, 64, device=GPU))]
    groups = [{"params": X}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]
    share = {"rank_fraction": 0.5} if direction in ("dion2", "nordion2", "low_rank") else {}
    optimizer = Dion(
        groups, direction=direction, look_ahead=1.05, replicas="single", capture=capture, **share
    )
    captured = []
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
            group["weight_decay"] = 0.01 * step
        for i, p in enumerate((*X, *rest)):
            generator = torch.Generator().manual_seed(100 * step + i)
            G = torch.randn(p.shape, generator=generator).to(GPU)
            if step == 12 and i == 1:
                G[0, 0] = float("nan")
            p.grad = placed(G) if i < len(X) else G
        optimizer.step()
        captured.append(optimizer.report.captured)
    states = [t for p in (*X, *rest) for t in optimizer.state[p].values()]
    every = [*X, *rest, *(t for t in states if isinstance(t, torch.Tensor))]
    return [local(t.detach()).clone() for t in every], captured


needs_triton = pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed")
DIRECTIONS = ["polar", "normuon", "dion2", "nordion2", "low_rank"]


@needs_triton
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_captured_steps_have_the_bits_of_eager_ones(direction):
    with ops.use_backend("triton"):
        wanted, eager = captured_run(direction, capture=False)
        found, captured = captured_run(direction, capture=True)
    assert not any(eager) and captured == [step >= 4 for step in range(20)]
    for actual, expected in zip(found, wanted, strict=True):
        assert torch.equal(actual, expected)


def check_shards(rank, directory):
    """On one of two ranks that share a GPU: replay steps with rows of matrices."""
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cuda", (2,))

    def rows(x):
        return shard(x, "0", mesh)

    with ops.use_backend("triton"):
        for direction in ("polar", "normuon", "low_rank"):
            wanted, eager = captured_run(direction, False, rows)
            # The second rank takes steps eagerly that the first one replays.
            found, captured = captured_run(direction, None if rank == 0 else False, rows)
            assert captured == ([step >= 4 for step in range(20)] if rank == 0 else eager)
            assert all(map(torch.equal, found, wanted)), direction
    dist.destroy_process_group()


@needs_triton
def test_captured_steps_on_shards_have_the_bits_of_eager_ones(tmp_path):
    multiprocessing.spawn(check_shards, (str(tmp_path),), nprocs=2)


@needs_triton
def test_graphs_outlive_those_of_another_optimizer():
    """Even if both use cuBLAS, whose workspaces torch keeps by stream."""
    X = [torch.nn.Parameter(torch.randn(256, 128, device=GPU)) for _ in range(3)]
    one, other = (Dion([x], rank_fraction=0.5, replicas="single", capture=True) for x in X[:2])
    eager = Dion(X[2:], rank_fraction=0.5, replicas="single", capture=False)
    with torch.no_grad():
        X[2].copy_(X[1])
    with ops.use_backend("triton"):
        for step in range(12):
            for x in X:
                generator = torch.Generator().manual_seed(step)
                x.grad = torch.randn(x.shape, generator=generator).to(GPU)
            if step < 8:
                one.step()
            elif step == 8:
                one.load_state_dict(one.state_dict())  # frees its graph
                torch.cuda.empty_cache()
            other.step()
            eager.step()
    assert other.report.captured
    assert torch.equal(X[1], X[2])


@needs_triton
def test_nothing_of_a_polar_step_runs_in_plain_pytorch():
    with ops.use_backend("triton"):
        refused.clear()
        captured_run("polar", capture=False)
    # A choice rule may prefer torch.bmm for small matrices.
    assert set(refused) <= {"grams", "inverse_root", "symmetric_product"}
