"""The error of a collective whose group has lost a member."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class MemberLost(RuntimeError):
    """A collective failed because another member has ended, hangs or is late."""


@contextmanager
def may_lose_members() -> Iterator[None]:
    """Turn what a collective raises inside into :class:`MemberLost`.

    Put nothing but collectives inside. Any other error, and an out-of-memory error even of a
    collective, must end this rank with its own traceback, not make it try again.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        # ValueError: torch can no longer name a group whose member was lost.
        raise MemberLost(str(error) or "a member was lost") from error
