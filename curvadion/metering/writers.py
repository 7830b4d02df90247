"""Writers for :func:`curvadion.metering.watch.watch`: JSON lines, TensorBoard, Weights & Biases.

Those of libraries take the object that the library's user has anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from curvadion.metering.events import Event
from curvadion.metering.json_lines import append_line


class JsonLinesWriter:
    """Appends a line of JSON: the step, the scalars by name, and a list of events.

    Args:
        path: of the file, which need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, step: int, scalars: Mapping[str, float], events: Sequence[Event]) -> None:
        """As :class:`curvadion.metering.watch.Writer` says."""
        events_as_json = [event.as_dict() for event in events]
        append_line(self._path, {"step": step, **scalars, "events": events_as_json})


class TensorBoardWriter:
    """Adds the scalars as ``curvadion/...``, and events as text.

    Args:
        board: a torch.utils.tensorboard.SummaryWriter.
    """

    def __init__(self, board: Any) -> None:
        self._board = board

    def write(self, step: int, scalars: Mapping[str, float], events: Sequence[Event]) -> None:
        """As :class:`curvadion.metering.watch.Writer` says."""
        for name, value in scalars.items():
            self._board.add_scalar(f"curvadion/{name}", value, step)
        for event in events:
            self._board.add_text("curvadion/events", str(event), event.step)


class WandbWriter:
    """Logs the scalars as ``curvadion/...``, and events as text.

    Args:
        run: what wandb.init() returned. Log your own values with the same steps.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, scalars: Mapping[str, float], events: Sequence[Event]) -> None:
        """As :class:`curvadion.metering.watch.Writer` says."""
        values: dict[str, Any] = {f"curvadion/{name}": value for name, value in scalars.items()}
        if events:
            values["curvadion/events"] = "\n".join(map(str, events))
        self._run.log(values, step=step)
