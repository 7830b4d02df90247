"""States in 8 bits an element, each operation defined in plain PyTorch.

A block is 256 elements x, in their order in memory; the last one is padded with zeros. Its codes
c are integers from -127 to 127, and share a scale:

    s    max |x| / 127 in float32, rounded to 17 significant bits; zero below 2^-126
    c    x / s, rounded to one of its two neighbours, and beyond 126.99 to 127

and they stand for the elements c s, which float32 holds exactly. The largest one gets the code
127, and 127 s gives the same s again: a state that is only decoded and encoded does not change.

Codes of roots are of states that are not negative, such as second moments. They stand for
(c s)^2, where c = 1 is the smallest one of an element that is not zero: a second moment of zero
would make its step infinite. Their s is zero below 2^-63, as squares must be normal numbers.

The codes of a tensor are one vector of bytes: 256 for each block, and behind them the scales of
all blocks. A tensor may be divided into parts, elements that follow one another in memory, such as
the matrices of a stack. Then each part has codes like a tensor of its own, and the vector holds
those of one part after another (:func:`code_places`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion.ops.backends import fused
from curvadion.ops.operations import random_bits
from curvadion.ops.tensors import Tensors, check_lengths

BLOCK = 256  # elements
SCALE_BYTES = 4
LARGEST = 127.0  # of the codes
ABOUT_LARGEST = 126.99  # s is rounded by 2^-18 of it at most
LEAST_SCALE = 2.0**-126  # the least normal number
LEAST_SCALE_OF_ROOTS = 2.0**-63  # its square is that number
# The lower 7 of a float32 number's 24 bits.
LOWER_BITS = 0x7F
# Bytes of whose multiple the codes of a part begin, for wide loads on GPUs.
ALIGNMENT = 16
# Elements that plain PyTorch encodes at a time, to stay in a CPU's caches.
CHUNK = 2**18
# Elements of tensors whose states are open at the same time: four bytes for each of its states.
MOST_OPENED = 2**22


def code_bytes(elements: int) -> int:
    """The bytes of a tensor's codes."""
    return blocks_of(elements) * (BLOCK + SCALE_BYTES)


def blocks_of(elements: int) -> int:
    """The number of blocks of a tensor."""
    return -(-elements // BLOCK)


def code_places(parts: Sequence[int]) -> list[slice]:
    """Where the codes of a tensor's parts lie in its vector, which ends with the last of them.

    Args:
        parts: the number of elements of each part, of which there is one at least.
    """
    places = []
    end = 0
    for elements in parts:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + code_bytes(elements)
        places.append(slice(start, end))
    return places


def codes_of_parts(codes: Tensor, parts: Sequence[int]) -> list[Tensor]:
    """The codes of each part of a tensor; views.

    Args:
        codes: of the tensor.
        parts: as in :func:`code_places`.

    Raises:
        ValueError: the codes are of another number of elements.
    """
    places = code_places(parts)
    needed = places[-1].stop
    if len(codes) != needed:
        raise ValueError(
            f"{len(codes)} bytes of codes for a tensor of {sum(parts)} elements, which needs "
            f"{needed}: was a parameter's shape changed?"
        )
    return [codes[place] for place in places]


def encode_states_(
    codes: Tensors, values: Tensors, seeds: Sequence[int] | None, *, roots: bool
) -> None:
    """codes <- codes of the values.

    Args:
        codes: vectors of :func:`code_bytes` int8 elements each.
        values: float32, of any shapes, without gaps in memory, below 2^100.
        seeds: an integer below 2^32 per tensor, with which elements (or their roots) are
            rounded up or down at random, so that the mean is exact; None rounds to nearest.
        roots: whether they are codes of roots; the values are then not negative.

    Raises:
        ValueError: the lists have unequal lengths, or codes are of other numbers of elements.
    """
    _check(codes, values)
    if seeds is not None:
        check_lengths(values, seeds)
    if fused("encode_states_", codes, values, seeds, roots, writes=[codes]):
        return
    seed_or_none: Sequence[int | None] = [None] * len(values) if seeds is None else seeds
    for coded, value, seed in zip(codes, values, seed_or_none, strict=True):
        x = _in_memory_order(value)
        c, scales = _parts(coded)
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            first = start // BLOCK
            blocks = slice(first, first + blocks_of(len(part)))
            c[blocks], scales[blocks] = _encode(part, start, seed, roots=roots)


def decode_states(codes: Tensors, like: Tensors, *, roots: bool) -> list[Tensor]:
    """The elements for which codes stand.

    Args:
        codes: vectors of :func:`code_bytes` int8 elements each.
        like: tensors of the shapes and strides of the result.
        roots: whether they are codes of roots.

    Returns:
        Float32 tensors without gaps in memory.

    Raises:
        ValueError: the lists have unequal lengths, or codes are of other numbers of elements.
    """
    values = [torch.empty_like(x, dtype=torch.float32) for x in like]
    _decode_into(values, codes, roots=roots)
    return values


def _decode_into(values: Tensors, codes: Tensors, *, roots: bool) -> None:
    """values <- the elements for which codes stand.

    Args:
        values: float32, without gaps in memory.
        codes: vectors of :func:`code_bytes` int8 elements each.
        roots: whether they are codes of roots.
    """
    _check(codes, values)
    if fused("decode_states_", values, codes, roots, writes=[values]):
        return
    for value, coded in zip(values, codes, strict=True):
        c, scales = _parts(coded)
        x = _in_memory_order(value)
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            first = start // BLOCK
            blocks = slice(first, first + blocks_of(len(part)))
            # c s
            elements = (c[blocks].float() * scales[blocks]).view(-1)[: len(part)]
            part.copy_(elements.square() if roots else elements)


def is_coded(state: object) -> bool:
    """Whether a state is a vector of codes."""
    return isinstance(state, Tensor) and state.dtype == torch.int8


class Opened:
    """States as tensors to read and write; those that are codes are decoded: float32 copies.

    Args:
        states: k tensors, or vectors of codes.
        like: k tensors, of the shapes and strides of what is decoded.
        roots: by state, whether its codes are of roots.
        parts: by state, the elements of each part that has codes of its own; () for one part each.

    Attributes:
        tensors: k tensors.
    """

    def __init__(
        self,
        states: Tensors,
        like: Tensors,
        roots: Sequence[bool],
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.tensors = list(states)
        self._coded: dict[bool, list[_CodedPart]] = {}  # by whether their codes are of roots
        for i, (state, of_roots) in enumerate(zip(states, roots, strict=True)):
            if not is_coded(state):
                continue
            copy = torch.empty_like(like[i], dtype=torch.float32)
            self.tensors[i] = copy
            coded_parts = self._coded.setdefault(of_roots, [])
            sizes = parts[i] if parts else ()
            if len(sizes) <= 1:
                coded_parts.append(_CodedPart(i, state, copy))
                continue
            values = _in_memory_order(copy).split(list(sizes))
            for codes, value in zip(codes_of_parts(state, sizes), values, strict=True):
                coded_parts.append(_CodedPart(i, codes, value))
        for of_roots, coded in self._coded.items():
            values_of_parts = [part.values for part in coded]
            _decode_into(values_of_parts, [part.codes for part in coded], roots=of_roots)

    def close(self, seeds: Sequence[int] | None = None) -> None:
        """Encode the copies.

        Args:
            seeds: k integers below 2^32, for random rounding; None rounds to nearest. Parts of
                one state are rounded with the same noise.
        """
        for of_roots, coded in self._coded.items():
            encode_states_(
                [part.codes for part in coded],
                [part.values for part in coded],
                None if seeds is None else [seeds[part.state] for part in coded],
                roots=of_roots,
            )


class _CodedPart(NamedTuple):
    """A part of an opened state."""

    state: int  # its place among the states
    codes: Tensor
    values: Tensor  # its elements: the copy, or a vector of some of them


def runs_to_open(states: Tensors, like: Tensors, most: int = MOST_OPENED) -> list[list[int]]:
    """Runs of states that are opened at the same time: opened ones are copies, which take memory.

    Args:
        states: k tensors, or vectors of codes.
        like: k tensors of the shapes of what the codes stand for.
        most: elements of a run that are codes; a larger state is a run by itself.

    Returns:
        The places 0 to k - 1, in runs.
    """
    runs: list[list[int]] = []
    left = 0
    for i, (state, x) in enumerate(zip(states, like, strict=True)):
        size = x.numel() if is_coded(state) else 0
        if not runs or size > left:
            runs.append([])
            left = most
        runs[-1].append(i)
        left = max(0, left - size)
    return runs


def check_states(states: Tensors, like: Tensors, seeds: Sequence[int] | None = None) -> None:
    """Raise ValueError for codes of a tensor of another size, or for too few or too many seeds.

    Args:
        states: tensors, and vectors of codes.
        like: tensors of the sizes of what they stand for.
        seeds: of the states, or None.
    """
    if seeds is not None and len(seeds) != len(states):
        raise ValueError(f"{len(seeds)} seeds of {len(states)} states: pass as many")
    coded = [(state, x) for state, x in zip(states, like, strict=True) if is_coded(state)]
    if any(state.storage_offset() % SCALE_BYTES for state, _ in coded):
        raise ValueError(
            "codes begin within a scale of their storage: clone() a slice of other bytes first"
        )
    _check([state for state, _ in coded], [x for _, x in coded])


def _check(codes: Tensors, values: Tensors) -> None:
    """Raise ValueError for codes of other tensors, beyond which a kernel would write."""
    for coded, value in zip(codes, values, strict=True):
        if len(coded) != code_bytes(value.numel()):
            raise ValueError(
                f"{len(coded)} bytes of codes for a tensor of shape {tuple(value.shape)}, which "
                f"needs {code_bytes(value.numel())}: was a parameter's shape changed?"
            )


def _parts(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, (blocks, 256) int8, and scales, (blocks, 1) float32; views."""
    blocks = len(codes) // (BLOCK + SCALE_BYTES)
    scales = codes[blocks * BLOCK :].view(torch.float32)
    return codes[: blocks * BLOCK].view(blocks, BLOCK), scales.view(blocks, 1)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A vector of a tensor's elements, which lie in memory without gaps; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _encode(x: Tensor, start: int, seed: int | None, *, roots: bool) -> tuple[Tensor, Tensor]:
    """Codes, (blocks, 256) int8, and scales, (blocks, 1) float32.

    Args:
        x: a vector of float32 elements.
        start: the position of the first one in its tensor.
        seed: of random rounding; None rounds to nearest.
        roots: whether to encode the elements' roots.
    """
    padding = -len(x) % BLOCK
    if roots:
        # In float64: some CPUs' float32 roots are off by a unit in the last place in PyTorch.
        x = x.double().sqrt().float()
    x = torch.nn.functional.pad(x, (0, padding)).view(-1, BLOCK)
    # s = max |x| / 127. GPUs multiply by the inverse of a host number, so it is a tensor.
    quotients = x.abs().amax(1, keepdim=True) / torch.full_like(x[:, :1], LARGEST)
    bits = quotients.view(torch.int32) + (LOWER_BITS + 1) // 2
    s = (bits & ~LOWER_BITS).view(torch.float32)
    s = s.where(s >= (LEAST_SCALE_OF_ROOTS if roots else LEAST_SCALE), 0.0)
    scaled = torch.where(s > 0, x / s, 0.0)
    if seed is None:
        # Ties go to the even code. Half of the means of two replicas' elements are ties, and
        # rounded always down they would lower the mean of all elements.
        c = scaled.round()
    else:
        # x / s lies between low and low + 1.
        low = scaled.floor()
        positions = torch.arange(start, start + x.numel(), device=x.device).view_as(x)
        # 16 random bits as a number in [0, 1)
        c = low + (scaled - low > random_bits(positions, seed).float() * 2.0**-16)
    c = torch.where(scaled.abs() > ABOUT_LARGEST, scaled.sign() * LARGEST, c)
    if roots:
        c = torch.where(scaled > 0, c.clamp_min(1), c)
    return c.to(torch.int8), s
