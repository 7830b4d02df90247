"""Asking the Lighthouse, also ahead of an opening."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

from torchft.manager import Manager

from curvadion.integrations.torchft.thread import in_thread
from curvadion.optim.replica_optimizer import RETRY_AFTER

SHORTEST_REQUEST = timedelta(seconds=5)


def name_of(identifier: str) -> str:
    """The name that the user gave to a replica; torchft appends a number to each start of it."""
    name, _, number = identifier.rpartition(":")
    return name or number


class Client:
    """A manager's client, which can ask ahead who takes part in the next opening.

    The manager asks by calling ``_quorum``; what has been asked ahead is then the answer. All
    other calls go to the manager's original client.

    Args:
        manager: whose client this replaces.

    Attributes:
        members: identifiers of those whom the last answer has found.
        own: this replica's identifier; empty before the first answer.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._client = manager._client
        self.members: set[str] = set()
        self.own = ""
        # Of a request that ask() has sent, until _quorum() uses it; None if there is none.
        self._answer_ahead: Future[Any] | None = None
        self._last_arguments: dict[str, Any] = {}  # of _quorum()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def ask(self, patience: float) -> bool:
        """Ask ahead; return whether the answer has come, so that others have.

        The first call since the last opening asks, and waits up to ``patience`` seconds.
        Later ones do not wait.
        """
        if self._answer_ahead is not None:
            return self._answer_ahead.done()
        arguments = {
            **self._last_arguments,
            "step": self._manager.current_step(),
            "commit_failures": self._manager._commit_failures,
        }
        self._answer_ahead = in_thread(partial(self._request, **arguments))
        return bool(wait([self._answer_ahead], patience).done)

    def _quorum(self, **arguments: Any) -> Any:
        answer = self._answer_ahead
        self._answer_ahead = None
        self._last_arguments = arguments
        quorum = self._request(**arguments) if answer is None else answer.result()
        self.members = set(quorum.replica_ids)
        self.own = quorum.replica_ids[quorum.replica_rank]
        return quorum

    def _request(self, *, timeout: timedelta, **arguments: Any) -> Any:
        """Ask until there is an answer, now and then anew.

        A restarted Lighthouse has forgotten the request.

        Args:
            timeout: after which the last request's error is raised.
            arguments: further ones of the original client's ``_quorum``.
        """
        end = time.monotonic() + timeout.total_seconds()
        request_timeout = min(timeout, max(timeout / 10, SHORTEST_REQUEST))
        while True:
            asked_at = time.monotonic()
            try:
                return self._client._quorum(timeout=request_timeout, **arguments)
            except Exception:
                if asked_at + request_timeout.total_seconds() >= end:
                    raise
                # Ask again at once, or a quorum might close meanwhile; but if nobody listens,
                # requests fail in no time.
                if time.monotonic() < asked_at + RETRY_AFTER:
                    time.sleep(RETRY_AFTER)
