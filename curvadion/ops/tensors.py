"""Lists of tensors as the fused operations need them: addresses, sizes and dtypes in arrays.

To ask every tensor of a model for its address, size, dtype and strides takes longer than a fused
operation on small tensors. So facts that cannot change are asked only once. Lists that exist as
long as a plan are :class:`Tensors` and remember their facts. Gradients are new at each step; as
:class:`FixedTensors` they take from their parameters what autograd guarantees to be the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter

import torch
from torch import Tensor

# The dtypes that compiled kernels take, and their codes there.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The largest magnitude of weights and momenta, by dtype. Products of such numbers are taken in
# float32 or wider, and stay in range there.
_LARGEST = {torch.float16: torch.finfo(torch.float16).max, torch.float64: 2.0**500}

_address = Tensor.data_ptr
_contiguous = Tensor.is_contiguous
_numel = Tensor.numel
_dtype = attrgetter("dtype")


@dataclass(frozen=True, eq=False)
class Sizes:
    """Shapes and strides of a list of tensors; lists with equal ones share one object."""

    shapes: tuple[tuple[torch.Size, tuple[int, ...]], ...]

    @cached_property
    def numel(self) -> array[int]:
        return array("q", [shape.numel() for shape, _ in self.shapes])

    @cached_property
    def dense(self) -> bool:
        """Whether no tensor has gaps or overlaps in memory."""
        return all(_dense(shape, strides) for shape, strides in self.shapes)

    @cached_property
    def contiguous(self) -> bool:
        """Whether every tensor is dense and row-major."""
        return self.dense and all(
            list(strides) == sorted(strides, reverse=True) for _, strides in self.shapes
        )


@dataclass(frozen=True, eq=False)
class Facts:
    """What compiled kernels need to know about a list of tensors.

    They do not keep the tensors: a list that remembers its facts would be a cycle, whose tensors
    stay until Python looks for such.

    Attributes:
        addresses: of the first elements.
        sizes: shapes and strides.
        dtypes: the set of dtypes.
        codes: one byte per tensor: its dtype's code in DTYPE_CODES, or 255 for other dtypes.
        device: the common device; None if there are several, or no tensor.
        copies: tensors that were made for these facts and must live as long.
    """

    addresses: list[int]
    sizes: Sizes
    dtypes: frozenset[torch.dtype]
    codes: array[int]
    device: torch.device | None
    copies: Sequence[Tensor] = ()

    @property
    def supported(self) -> bool:
        """Whether compiled kernels take these dtypes, and all tensors are on one device."""
        return self.device is not None and self.dtypes <= DTYPE_CODES.keys()

    @cached_property
    def pointers(self) -> array[int]:
        return array("Q", self.addresses)

    def at(self, addresses: list[int]) -> Facts:
        """The facts of other tensors that differ from these in their addresses only."""
        return Facts(addresses, self.sizes, self.dtypes, self.codes, self.device)


class Tensors(tuple[Tensor, ...]):
    """A list of tensors that remembers its facts.

    The tensors must keep their sizes and dtypes: nothing may set their ``.data``. If one of them
    has moved in memory, the list is inspected again.
    """

    _facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        addresses = list(map(_address, self))
        if self._facts is None or self._facts.addresses != addresses:
            self._facts = _inspect(self, addresses)
        return self._facts


class Parameters(Tensors):
    """As :class:`Tensors`, but ``.data`` may be set, even to other dtypes and sizes."""

    _seen: tuple[list[torch.dtype], list[int]] | None = None

    @property
    def facts(self) -> Facts:
        # New data may have the address of old data, so addresses alone are not enough.
        seen = list(map(_dtype, self)), list(map(_numel, self))
        if seen != self._seen:
            self._facts, self._seen = None, seen
        return super().facts


class FixedTensors(Tensors):
    """A list of tensors that do not move while it is used, which is for one step."""

    _given: Facts

    @classmethod
    def of(cls, tensors: Tensors) -> FixedTensors:
        """The same list, with its facts as they are now."""
        made = cls(tensors)
        made._given = tensors.facts
        return made

    @classmethod
    def gradients(cls, gradients: Sequence[Tensor], of: FixedTensors) -> FixedTensors:
        """The gradients of the parameters ``of``, in the same order.

        Autograd has checked the devices. Here dtypes and strides are compared, and sizes: a
        parameter's ``.data`` may have been set after its backward pass.
        """
        made, known = cls(gradients), of.facts
        addresses = list(map(_address, gradients))
        alike = (
            known.sizes.contiguous
            and len(known.dtypes) == 1
            and set(map(_dtype, gradients)) == known.dtypes
            and all(map(_contiguous, gradients))
            and array("q", map(_numel, gradients)) == known.sizes.numel
        )
        made._given = known.at(addresses) if alike else _inspect(made, addresses)
        return made

    @property
    def facts(self) -> Facts:
        return self._given


def largest(dtype: torch.dtype) -> float:
    """The largest magnitude of weights and momenta of a dtype, at which they saturate."""
    return _LARGEST.get(dtype, 2.0**100)


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value, limited to the range of weights and momenta of ``dtype``; NaN stays NaN."""
    return value.clamp(-largest(dtype), largest(dtype))


def saturate_(values: list[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Limit each value, in place, as :func:`saturated` does; it may be narrower than its dtype."""
    pairs = zip(values, dtypes, strict=True)
    limits = [min(largest(dtype), torch.finfo(value.dtype).max) for value, dtype in pairs]
    torch._foreach_clamp_min_(values, [-limit for limit in limits])
    torch._foreach_clamp_max_(values, limits)


def from_host(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor, (k,), on a device, without a copy that the host would wait for."""
    if device.type != "cuda" or not numbers:
        return torch.tensor(numbers, dtype=dtype, device=device)
    if numbers.count(numbers[0]) == len(numbers):
        return torch.full((len(numbers),), numbers[0], dtype=dtype, device=device)
    pinned = torch.tensor(numbers, dtype=dtype, device="cpu").pin_memory()
    return pinned.to(device, non_blocking=True)


def norm_and_sum(x: Tensor) -> Tensor:
    """Norm and sum of a tensor, (2,) float64. Only a chunk is held in float64 at a time."""
    flat = x.mT if x.dim() == 2 and not x.is_contiguous() and x.mT.is_contiguous() else x
    chunks = []
    for chunk in flat.reshape(-1).split(2**20 if x.device.type == "cpu" else 2**26):
        wide = chunk.double()
        chunks.append(torch.stack([torch.linalg.vector_norm(wide), wide.sum()]))
    if len(chunks) == 1:
        return chunks[0]
    norms, sums = torch.stack(chunks, dim=1)
    return torch.stack([torch.linalg.vector_norm(norms), sums.sum()])


class Unsupported(Exception):
    """A backend cannot take these tensors, but plain PyTorch can."""


def facts_of(tensors: Sequence[Tensor]) -> Facts:
    """The facts of any list of tensors; a :class:`Tensors` remembers them."""
    if isinstance(tensors, Tensors):
        return tensors.facts
    return _inspect(tensors, list(map(_address, tensors)))


def elementwise_facts(
    written: Sequence[Sequence[Tensor]], read: Sequence[Sequence[Tensor]] = ()
) -> list[Facts]:
    """Facts of lists for an elementwise operation: tensors of one position have equal strides.

    If a tensor that is only read has other strides than the first list's, it is replaced by a copy
    with these strides. (Autograd rarely makes such gradients.)

    Args:
        written: lists that the operation writes; at least one.
        read: lists that it only reads.

    Raises:
        ValueError: if lengths or shapes differ.
        Unsupported: if compiled kernels do not take the dtypes or devices, or a tensor has gaps.
    """
    every = [facts_of(list_) for list_ in (*written, *read)]
    first = every[0]
    for i, (one, list_) in enumerate(zip(every, (*written, *read), strict=True)):
        if not one.supported or one.device != first.device:
            raise Unsupported
        if one.sizes is first.sizes or one.sizes.shapes == first.sizes.shapes:
            continue
        check_shapes(written[0], list_)
        if i < len(written):
            raise Unsupported
        copies = _with_strides_of(written[0], list_)
        every[i] = replace(facts_of(copies), copies=copies)
    if not first.sizes.dense:
        raise Unsupported
    return every


def factors_facts(Q: Sequence[Tensor], R: Tensor, *per_column: Tensor | None) -> Facts:
    """Facts of the k tensors Q, (n, r), that column_normalize_ writes.

    Args:
        Q: the right factors.
        R: (k, n, r).
        per_column: float64 numbers, (k, r) each, or None.

    Raises:
        ValueError: if shapes do not fit.
        Unsupported: if compiled kernels do not take the dtypes, devices or strides.
    """
    k, n, r = R.shape
    facts = facts_of(Q)
    given = [numbers for numbers in per_column if numbers is not None]
    fit = all(numbers.shape == (k, r) for numbers in given)
    if len(Q) != k or any(shape != (n, r) for shape, _ in facts.sizes.shapes) or not fit:
        raise ValueError(
            f"R has shape {(k, n, r)}: give {k} Q of {(n, r)}, and sums and floors of {(k, r)}"
        )
    if not (facts.supported and facts.sizes.contiguous and facts.device == R.device):
        raise Unsupported
    if any(numbers.dtype != torch.float64 for numbers in given):
        raise Unsupported
    return facts


def float32_stack(R: Tensor) -> tuple[int, int, int]:
    """(k, n, r) of a stack (..., n, r) of k matrices.

    Raises:
        Unsupported: if it is not contiguous or not float32.
    """
    if R.dtype != torch.float32 or not R.is_contiguous():
        raise Unsupported
    return R.shape[:-2].numel(), R.shape[-2], R.shape[-1]


def check_product(A: Tensor, B: Tensor, out: Tensor) -> tuple[int, int, int]:
    """(k, n, m) of a product A B of k matrices that is to be symmetric.

    Raises:
        ValueError: unless A is (k, n, m), B (k, m, n) and out (k, n, n), of one dtype and device,
            or if out is expanded.
    """
    shapes = tuple(tuple(t.shape) for t in (A, B, out))
    k, n, m = shapes[0] if A.dim() == 3 else (0, 0, -1)
    if shapes != ((k, n, m), (k, m, n), (k, n, n)):
        raise ValueError(
            f"A, B and out of shapes {shapes}: they must be (k, n, m), (k, m, n) and (k, n, n)"
        )
    if len({(t.dtype, t.device) for t in (A, B, out)}) > 1:
        found = [f"{t.dtype} on {t.device}" for t in (A, B, out)]
        raise ValueError(f"A, B and out are {found}: they must have one dtype and device")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("out is expanded, so that its numbers share memory: it must have its own")
    return k, n, m


def _with_strides_of(X: Sequence[Tensor], Y: Sequence[Tensor]) -> list[Tensor]:
    return [
        y if y.stride() == x.stride() else torch.empty_like(x, dtype=y.dtype).copy_(y)
        for x, y in zip(X, Y, strict=True)
    ]


def check_shapes(X: Sequence[Tensor], Y: Sequence[Tensor]) -> None:
    """Raise ValueError unless both lists have the same shapes."""
    if len(X) != len(Y):
        raise ValueError(f"lists of {len(X)} and {len(Y)} tensors: they must be equally long")
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        if x.shape != y.shape:
            raise ValueError(
                f"tensors {i} of two lists have shapes {tuple(x.shape)} and {tuple(y.shape)}: "
                f"they must be equal"
            )


def _inspect(tensors: Sequence[Tensor], addresses: list[int]) -> Facts:
    devices = {t.device for t in tensors}
    return Facts(
        addresses,
        _sizes(tuple((t.shape, t.stride()) for t in tensors)),
        frozenset(map(_dtype, tensors)),
        array("B", [DTYPE_CODES.get(t.dtype, 255) for t in tensors]),
        devices.pop() if len(devices) == 1 else None,
    )


@lru_cache(maxsize=256)
def _sizes(shapes: tuple[tuple[torch.Size, tuple[int, ...]], ...]) -> Sizes:
    return Sizes(shapes)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
