"""Calls in a thread of their own, for which nobody has to wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Begin work in a new thread, and return its future result.

    No executor: Python would wait for its thread at exit.
    """
    future = Future[Result]()
    Thread(target=_run_into, args=(future, work), daemon=True).start()
    return future


def _run_into(future: Future[Result], work: Callable[[], Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
