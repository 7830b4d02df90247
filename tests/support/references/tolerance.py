"""One way to compare floats: say where rounding comes from, and get a bound with headroom.

    assert_close(actual, expected, Rounding(torch.float32, terms=64, steps=10))
    assert_within(relative_error(actual, expected), Rounding(torch.float32, condition=100))

A bound follows from the computation, not from what one machine happened to give: CPUs, BLAS kernels
and thread counts round differently. ``make headroom`` measures how much of each bound is used.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

HEADROOM = 16.0  # a bound is this many times the error that the model below expects
REPORT = "CURVADION_HEADROOM"  # names the file to which each comparison appends a line


@dataclass(frozen=True)
class Rounding:
    """The relative error that a correct computation may have.

    Args:
        dtype: in which values are rounded: the coarsest that both sides do not share.
        terms: of the longest sum; the error of a sum grows with the root of their number.
        condition: by how much the result amplifies a relative error of its input.
        steps: in sequence, each of which adds its error.
    """

    dtype: torch.dtype
    terms: int = 1
    condition: float = 1.0
    steps: int = 1

    @property
    def allowed(self) -> float:
        eps = torch.finfo(self.dtype).eps
        return HEADROOM * eps * self.terms**0.5 * self.condition * self.steps


def assert_close(
    actual: Tensor | float,
    expected: Tensor | float,
    rounding: Rounding,
    *,
    scale: float | None = None,
    elementwise: bool = False,
    what: object = "",
) -> None:
    """Fail unless actual is expected up to rounding.

    Args:
        actual, expected: of the same shape; compared in float64 on the CPU.
        rounding: where the difference may come from.
        scale: what the error is relative to; None takes the norm of expected.
        elementwise: compare the largest error of an element with the largest element, instead of
            Frobenius norms.
        what: is compared, for the message.
    """
    a, e = (torch.as_tensor(x).detach().double().cpu() for x in (actual, expected))
    assert a.shape == e.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(e.shape)}"
    size = (lambda x: x.abs().max()) if elementwise else torch.Tensor.norm
    if not a.numel():
        return
    error, whole = float(size(a - e)), float(size(e)) if scale is None else scale
    # Where nothing is expected, an error has nothing to be relative to.
    assert_within(error / whole if whole else error and float("inf"), rounding, what=what)


def assert_within(error: float, rounding: Rounding, *, what: object = "") -> None:
    """Fail unless a relative error is one that rounding explains."""
    share = float(error) / rounding.allowed
    _note(share)
    assert share <= 1, f"{what}: error {error:.3g} is {share:.3g} of what {rounding} allows"


def worst(errors: Iterable[float]) -> float:
    """The largest error; NaN if one is NaN, which Python's max passes over."""
    return float(torch.tensor([*errors], dtype=torch.float64).max())


def _note(share: float) -> None:
    """Append what part of its bound a comparison used, if a report is wanted."""
    if not (path := os.environ.get(REPORT)):
        return
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    line = {
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0],
        "where": f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}",
        "share": share,
    }
    with open(path, "a", encoding="utf-8") as report:  # one write: ranks append to the same file
        report.write(json.dumps(line) + "\n")
