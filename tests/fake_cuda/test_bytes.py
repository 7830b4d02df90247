"""Bytes of a polar step on a GPU, from fake CUDA tensors: what it moves, and what it allocates."""

import weakref
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvadion import Dion
from support.devices.counted_steps import MODELS, Case, answers_of, parameters_of
from support.devices.fake_cuda import ALLOCATIONS, Count, fake_cuda, is_on_gpu, needs_fake_cuda

pytestmark = needs_fake_cuda

# Elementwise kernels, and which lists of their tables they read and write.
LISTS = {
    "lengths_kernel": ["r", "r"],  # M, G
    "ahead_kernel": ["rw", "r", "w"],  # M, G, B
    "local_step_kernel": ["rw", "r"],  # X, U
}
# Kernels whose work is products: of B, of Gram matrices, and between these.
PRODUCTS = {"grams_kernel", "product_kernel", "symmetric_kernel", "aten::bmm"}
# Kernels on Gram matrices alone, and on other parameters or a few numbers.
OTHERS = {"first_factor_kernel", "drop_kernel", "adamw_kernel", "verdict_kernel"}
DTYPES = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"stochastic_rounding": True}),
}


class Traffic(Count):
    """Bytes that elementwise work reads and writes in a step, by kernel or operator.

    Args:
        others: tensors whose bytes do not count.
    """

    def __init__(self, others):
        super().__init__(answers_of(signal=1.0))
        self.bytes = Counter()
        self._others = {t.untyped_storage()._cdata for t in others}
        self._tables = {}

    def note_table(self, table, lists):
        """Take a table for that of a launch with these lists."""
        self._tables[id(table)] = table, lists

    def launch(self, name, arguments, constants):
        super().launch(name, arguments, constants)
        if name in PRODUCTS | OTHERS:
            return
        [lists] = [self._tables[id(a)][1] for a in arguments if id(a) in self._tables]
        for uses, tensors in zip(LISTS[name], lists, strict=True):
            self.bytes[name] += len(uses) * self._size(tensors)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        schema = function._schema
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        works = not (views or schema.name.startswith((*ALLOCATIONS, "prim")))
        if works and schema.name not in PRODUCTS:
            # Results in memory of an argument count once more: these are read and written.
            every = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.bytes[schema.name] += self._size([t for t in every if is_on_gpu(t)])
        return result

    def _size(self, tensors):
        return sum(t.nbytes for t in tensors if t.untyped_storage()._cdata not in self._others)


class LiveBytes(TorchDispatchMode):
    """The most bytes on the device of storages that began inside the block and were alive at once.

    A storage is alive as long as one of its tensors is.
    """

    def __init__(self):
        super().__init__()
        self.most = 0
        self._alive = {}  # by storage: its bytes, and how many tensors it has

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        given = {id(t) for t in tree_leaves((args, kwargs))}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and is_on_gpu(t) and id(t) not in given:
                self._note(t, new=t.untyped_storage()._cdata not in before)
        return result

    def _note(self, tensor, new):
        storage = tensor.untyped_storage()
        if new:
            self._alive[storage._cdata] = [storage.nbytes(), 0]
        if storage._cdata in self._alive:
            self._alive[storage._cdata][1] += 1
            weakref.finalize(tensor, self._forget, storage._cdata).atexit = False
        self.most = max(self.most, sum(size for size, _ in self._alive.values()))

    def _forget(self, storage):
        self._alive[storage][1] -= 1
        if not self._alive[storage][1]:
            del self._alive[storage]


def steps(dtype, **options):
    """The parameters of GPT-2 160M and a polar optimizer, after two steps."""
    parameters, groups = parameters_of(Case("GPT-2 160M", dtype, 1, Dion, ()))
    optimizer = Dion(groups, direction="polar", replicas="single", capture=False, **options)
    for _ in range(2):
        give_gradients(parameters)
        with Count(answers_of(signal=1.0)):
            optimizer.step()
    give_gradients(parameters)
    return parameters, optimizer


def give_gradients(parameters):
    for p in parameters:
        p.grad = torch.empty_like(p)


def moved_by_a_step(dtype, **options):
    """The bytes that a step moves for an element of a matrix, by kernel or operator."""
    launch = pytest.importorskip("curvadion_kernels.launch").Launch
    make_table = launch.table
    with fake_cuda():
        parameters, optimizer = steps(dtype, **options)
        matrices = len(MODELS["GPT-2 160M"]()[0])
        others = list(parameters[matrices:])
        others += [p.grad for p in others]
        traffic = Traffic(others)

        def table(self, lists, *numbers):
            found = make_table(self, lists, *numbers)
            # Lists of other dtypes have launches of their own.
            traffic.note_table(found, [self._chosen(each) for each in lists])
            return found

        with mock.patch.object(launch, "table", table), traffic:
            optimizer.step()
    assert not (traffic.refusals or traffic.absent)
    elements = sum(p.numel() for p in parameters[:matrices])
    return {name: size / elements for name, size in traffic.bytes.items()}


def formula(dtype):
    """Bytes for an element: M and G, and X, have this size, and B and U are in half precision."""
    wide = dtype.itemsize
    half = 2
    lengths = wide + wide  # M, G
    ahead = wide + wide + wide + half  # M twice, G, B
    update = wide + wide + half  # X twice, U
    return {"lengths_kernel": lengths, "ahead_kernel": ahead, "local_step_kernel": update}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elementwise_kernels_move_few_bytes(dtype):
    """Products are left out, and what is elementwise on Gram matrices alone."""
    dtype, options = DTYPES[dtype]
    moved = moved_by_a_step(dtype, **options)
    wanted = formula(dtype)
    # Other operators send tables.
    small = sum(each for name, each in moved.items() if name not in wanted)
    assert small < 0.01, moved
    assert {name: moved[name] for name in wanted} == wanted


def test_a_step_allocates_less_than_the_weights():
    with fake_cuda():
        parameters, optimizer = steps(torch.float32)
        with Count(answers_of(signal=1.0)), LiveBytes() as live:
            optimizer.step()
        weights = sum(p.nbytes for p in parameters)
    assert live.most <= 0.7 * weights, live.most / weights
