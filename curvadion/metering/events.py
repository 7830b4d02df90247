"""What happens to the replicas of a run, for whoever operates it.

An event goes to a list, to the logger "curvadion" and, if a path is given, to a file.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from curvadion.metering.json_lines import append_line

# In the order in which a replica may meet them; docs/elastic.md says what each one means.
Kind = Literal[
    "waiting",
    "began",
    "copied",
    "settings",
    "joined",
    "late",
    "left",
    "caught up",
    "failed",
    "strayed",
    "leaving",
]
WARNINGS = ("waiting", "began", "failed", "strayed")
PATH_VARIABLE = "CURVADION_EVENT_LOG"
logger = logging.getLogger("curvadion")


@dataclass(frozen=True)
class Event:
    """Something that happened to a replica, as one of them tells it.

    Args:
        kind: what happened; docs/elastic.md lists the kinds.
        text: the same for people, with details.
        member: the replica to which it happened.
        replica: the one that tells.
        step: the steps that the teller has counted.
        opening: the openings that it has counted.
        seconds: how long it took; None if it took no time.
        bytes: that were received; None if there were none.
        time: seconds since the epoch.
    """

    kind: Kind
    text: str
    member: str
    replica: str
    step: int
    opening: int
    seconds: float | None = None
    bytes: int | None = None
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        where = f"replica {self.replica}, step {self.step}, opening {self.opening}"
        return f"{self.text} ({where})"

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class EventLog:
    """The events that a replica tells.

    Args:
        path: of a file to which they are appended as lines of JSON. Replicas may share it.
            None: $CURVADION_EVENT_LOG; if that is not set either, there is no file.
        first: whether this is the replica's first rank. Others keep the list, but tell only of
            what is a warning, because the first tells of the rest.

    Attributes:
        events: all so far.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None = None, *, first: bool = True) -> None:
        path = path or os.environ.get(PATH_VARIABLE)
        self.events: list[Event] = []
        self._first = first
        self._path = Path(path) if path and first else None
        if self._path is not None:
            self._path.open("a").close()  # rather an error now than an event that is lost

    def add(self, event: Event) -> None:
        """Tell of an event."""
        self.events.append(event)
        warns = event.kind in WARNINGS
        if self._first or warns:
            logger.log(logging.WARNING if warns else logging.INFO, "%s", event)
        if self._path is None:
            return
        try:
            append_line(self._path, event.as_dict())
        except OSError as error:  # a full disk must not end a replica
            logger.warning("An event could not be written to %s: %s", self._path, error)
