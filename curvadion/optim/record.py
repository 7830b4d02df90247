"""The progress of a run, and the text in which a checkpoint stores it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from curvadion import checks
from curvadion.comm.groups import Replica
from curvadion.gates import Gate
from curvadion.sync.base import Sync
from curvadion.update.hyperparameters import RECORD


@dataclass
class Progress:
    """The progress of a run; the same on every replica, except for skips under a schedule."""

    steps: int = 0  # including skipped ones
    local_steps: int = 0  # since the replicas last synchronised
    consecutive_skips: int = 0  # for non-finite gradients
    steps_since_exact: int = 0  # since all state was last identical on all replicas

    @property
    def shared(self) -> tuple[int, ...]:
        """The counters that are equal on all replicas."""
        return self.steps, self.local_steps, self.steps_since_exact


@dataclass(frozen=True)
class Record:
    """The contents of a checkpoint besides groups and tensors."""

    progress: Progress
    gate: dict[str, Any]  # its state_dict()
    sync: dict[str, Any]
    gate_class: str
    sync_class: str
    sync_keys: list[str]  # state keys that only this sync knows
    fragments_drifted: int
    replica: Replica | None  # the one that saved, if its state cannot stand for all


def record(progress: Progress, gate: Gate, sync: Sync, replica: Replica | None) -> str:
    """A :class:`Record` as JSON text: one leaf, as checkpoint tools lose parts of dictionaries."""
    held = {
        "progress": asdict(progress),
        "gate": gate.state_dict(),
        "sync": sync.state_dict(),
        "gate_class": type(gate).__name__,
        "sync_class": type(sync).__name__,
        "sync_keys": [key.name for key in sync.state_keys],
        "fragments_drifted": sync.fragments_drifted,
        "replica": replica,
    }
    try:
        return json.dumps(held, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"state_dict() of gate={gate!r} is {held['gate']!r} and of sync={sync!r} "
            f"{held['sync']!r}: they must hold numbers, strings, lists and dictionaries with "
            f"string keys only ({error})"
        ) from error


def load_memory(name: str, choice: Gate | Sync, memory: Mapping[str, Any]) -> None:
    """Restore a gate or a sync from its state in a checkpoint; name: used in errors."""
    try:
        choice.load_state_dict(dict(memory))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"state_dict holds {memory!r}, which {name}={choice!r} cannot load "
            f"({type(error).__name__}: {error})."
        ) from error


def read_record(state_dict: Mapping[str, Any]) -> Record:
    """Return the record in a state_dict's groups; raise if it is another optimizer's or damaged."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise TypeError(f"state_dict={state_dict!r} must be what state_dict() returned")
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not groups or not all(isinstance(each, Mapping) for each in (states, *groups)):
        raise ValueError(f"state_dict has param_groups={groups!r}: it holds no optimizer's state.")
    if odd := [key for key, state in states.items() if not isinstance(state, Mapping)]:
        raise ValueError(f"state_dict['state'] has no dictionaries under {odd}: it is damaged.")
    if any(RECORD not in group for group in groups):
        raise ValueError(
            f"state_dict was not saved by an optimizer of curvadion: a param group lacks the key "
            f"{RECORD!r}. Load it into an optimizer of the class that saved it; if that one is "
            f"inside Replicated, into optimizer.inner[i]."
        )
    return parse_record(groups[0][RECORD])


def parse_record(text: Any) -> Record:
    """The inverse of :func:`record`; ValueError if it is damaged."""
    try:
        held = json.loads(text)
        for name, count in {**held["progress"], "drifted": held["fragments_drifted"]}.items():
            checks.integer(name, count, 0)
        replica = held["replica"] and Replica(*held["replica"])
        return Record(**{**held, "progress": Progress(**held["progress"]), "replica": replica})
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"state_dict is damaged: {RECORD!r} in its param groups is {text!r} ({error}). Load "
            f"another checkpoint."
        ) from error
