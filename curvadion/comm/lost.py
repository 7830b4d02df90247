"""The error of a collective whose group has lost a member."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from curvadion.comm.waiting import waiting


class MemberLost(RuntimeError):
    """A collective failed because another member has ended, hangs or is late."""


@contextmanager
def may_lose_members() -> Iterator[None]:
    """Turn what a collective raises inside into :class:`MemberLost`; count it as waiting.

    Put nothing but collectives inside. Any other error, and one of this rank's device even if
    a collective is the first to see it, must end the rank with its own traceback, not make it
    try again.
    """
    try:
        with waiting():
            yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        # torch can no longer name a group whose member was lost.
        if isinstance(error, ValueError) and "group" not in str(error).lower():
            raise
        raise MemberLost(str(error) or "a member was lost") from error
