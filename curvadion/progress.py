"""How far a run has come, and the text in which a checkpoint holds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from curvadion.gate import Gate


@dataclass
class Progress:
    """How far a run has come; the same on every replica.

    Attributes:
        steps: steps taken, skipped ones included.
        local_steps: steps since the replicas last synchronised.
        skipped_in_a_row: steps skipped for a non-finite gradient since the last that was not.
        part: of the parameters, the one that comes together when the gate opens next.
        parts_apart: so many parts, from that one on, have moved since replicas agreed on them.
    """

    steps: int = 0
    local_steps: int = 0
    skipped_in_a_row: int = 0
    part: int = 0
    parts_apart: int = 0


def record(progress: Progress, gate: Gate) -> str:
    """Progress and the gate's memory as JSON text: one leaf, which checkpoint tools keep whole.

    (They flatten dictionaries, lose empty ones, and load only the keys that exist already.)

    Raises:
        TypeError: if the gate's state holds what JSON cannot.
    """
    state = gate.state_dict()
    try:
        return json.dumps({**asdict(progress), "gate": state}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"state_dict() of gate={gate!r} is {state!r}: it must hold numbers, strings, lists and "
            f"dictionaries with string keys only ({error})"
        ) from error


def read_record(state_dict: dict[str, Any]) -> tuple[Progress, dict[str, Any]]:
    """The inverse of :func:`record`, of the one that a state_dict's groups hold.

    Raises:
        ValueError: if the state was saved by an optimizer that is not ours.
    """
    if not state_dict.get("param_groups"):
        raise ValueError("state_dict has no param_groups: it holds no optimizer's state.")
    for group in state_dict["param_groups"]:
        for key in ("algorithm", "progress"):
            if key not in group:
                raise ValueError(
                    f"state_dict was not saved by CurvaDion or Dion: a param group lacks the key "
                    f"{key!r}. Load it into the optimizer that saved it."
                )
    held = json.loads(state_dict["param_groups"][0]["progress"])
    gate: dict[str, Any] = held.pop("gate")
    return Progress(**held), gate
