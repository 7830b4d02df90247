"""States in 8 bits of parameters, opened: this rank's shards as tensors to read and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from curvadion import ops
from curvadion.layout.dtensor import local
from curvadion.layout.matrix import division_of
from curvadion.layout.placements import global_shape
from curvadion.plan.coded_states import CODED, coded_parts, open_codes
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import MOMENTUM


def open_states(owners: Sequence[tuple[Parameter, str]]) -> ops.Opened:
    """This rank's shards of states, as tensors to read and write.

    Args:
        owners: the parameter and the key of each of k states.
    """
    return open_codes(
        [local(p.state[key]) for p, key in owners],
        [key for _, key in owners],
        [p.X for p, _ in owners],
        [p.group for p, _ in owners],
    )


def open_momenta(parameters: Sequence[Parameter]) -> ops.Opened:
    """The momenta of parameters, of the shapes of their local tensors."""
    return open_states([(p, MOMENTUM) for p in parameters])


@contextmanager
def opened(
    owners: Sequence[tuple[Parameter, str]], seeds: Sequence[int] | None = None
) -> Iterator[list[Tensor]]:
    """This rank's shards of states, to write; those in 8 bits are encoded after the block.

    Args:
        owners: the parameter and the key of each of k states.
        seeds: k integers below 2^32, for random rounding; None rounds to nearest.
    """
    of_block = open_states(owners)
    yield of_block.tensors
    of_block.close(seeds)


def check_division(parameters: Sequence[Parameter]) -> None:
    """Raise ValueError if momenta are codes of other matrices than those of a new plan.

    Args:
        parameters: the matrix parameters of the plan.
    """
    for p in parameters:
        if not p.keeps_codes or MOMENTUM not in p.state:
            continue
        coded = coded_parts(p.M)
        if coded is not None and coded.division != division_of(global_shape(p.X), p.group):
            raise ValueError(
                f"the matrices of {p.name} are others than those of which state_dtype={CODED!r} "
                f"keeps codes: leave row_blocks={p.group['row_blocks']!r}, column_blocks, "
                f"stack_dims and input_first as they were, or call "
                f"optimizer.load_state_dict(optimizer.state_dict()), which changes the codes"
            )
