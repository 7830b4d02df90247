"""Writing an optimizer's reports and events somewhere every few steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from curvadion import checks
from curvadion.metering.events import Event
from curvadion.metering.report import StepReport, Summary

logger = logging.getLogger("curvadion")


class Writer(Protocol):
    """Where numbers and events go; curvadion.metering has some for known programs."""

    def write(self, step: int, scalars: Mapping[str, float], events: Sequence[Event]) -> None:
        """Write what has happened since the last call.

        Args:
            step: of the optimizer, counted from 1.
            scalars: of :meth:`curvadion.Summary.scalars`: means over the steps since then,
                and the totals over them that ``curvadion.metering.report.TOTALS`` names.
            events: since then, of replicas that come and go.
        """


class Watched(Protocol):
    """What is watched: a CurvaDion, Dion or Replicated."""

    report: StepReport | None
    replicas: Any

    def register_step_post_hook(self, hook: Any) -> Any:
        """As torch's optimizers have it."""


def watch(optimizer: Watched, writer: Writer, *, every: int = 10) -> Callable[[], None]:
    """Write an optimizer's numbers and events after every so many steps.

    Call it on one rank of each replica that is to be watched. It waits for no GPU. While a
    :class:`curvadion.WireMeter` is active, bytes are among the numbers. If writing raises an
    OSError, such as that of a full disk, a warning says so and training goes on.

    Args:
        optimizer: a CurvaDion, Dion or Replicated.
        writer: of this package or your own.
        every: how many steps.

    Returns:
        A function that writes what is left and ends it. Call it at the end.
    """
    checks.integer("every", every, 1)
    members = optimizer.replicas.members
    summary = Summary()
    written = 0  # events

    def write() -> None:
        nonlocal summary, written
        last = optimizer.report
        events = list(members.events[written:])
        if last is None or not (summary.steps or events):
            return
        scalars = summary.scalars(last)
        summary = Summary()
        written += len(events)
        try:
            writer.write(last.step, scalars, events)
        except OSError as error:
            logger.warning("Step %d could not be written: %s", last.step, error)

    def add(*_: Any) -> None:
        if optimizer.report is not None:
            summary.add(optimizer.report)
        if summary.steps >= every:
            write()

    hook = optimizer.register_step_post_hook(add)

    def stop() -> None:
        hook.remove()
        write()

    return stop
