"""How far a run has come, and the text in which a checkpoint holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from curvadion import checks
from curvadion.comm.replicas import Replica
from curvadion.gates import Gate
from curvadion.sync.base import Sync
from curvadion.update.hyperparameters import RECORD


@dataclass
class Progress:
    """How far a run has come; the same on every replica, unless said otherwise.

    Attributes:
        steps: steps taken, skipped ones included.
        local_steps: steps since the replicas last synchronised.
        consecutive_skips: steps skipped for a non-finite gradient since the last that was not;
            each replica's own under a schedule.
        steps_since_exact: steps since all state was last the same on all replicas.
    """

    steps: int = 0
    local_steps: int = 0
    consecutive_skips: int = 0
    steps_since_exact: int = 0

    @property
    def shared(self) -> tuple[int, ...]:
        """What is the same on all replicas."""
        return self.steps, self.local_steps, self.steps_since_exact


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds besides groups and tensors.

    Attributes:
        progress: of the run.
        gate, sync: their memories (``state_dict()``).
        gate_class, sync_class: the names of their classes.
        sync_keys: the state keys that only this sync kind knows.
        fragments_drifted: how many fragments of the weights had moved since replicas agreed on
            them.
        replica: the one that saved it, if it cannot stand for all; else None.
    """

    progress: Progress
    gate: dict[str, Any]
    sync: dict[str, Any]
    gate_class: str
    sync_class: str
    sync_keys: list[str]
    fragments_drifted: int
    replica: Replica | None

    @property
    def drifted(self) -> bool:
        """Whether replicas, if there were several, held different weights."""
        return self.progress.local_steps > 0 or self.fragments_drifted > 0


def record(progress: Progress, gate: Gate, sync: Sync, replica: Replica) -> str:
    """A :class:`Record` as JSON text: one leaf, which checkpoint tools keep whole.

    (They flatten dictionaries, lose empty ones, and load only the keys that exist already.)

    Raises:
        TypeError: if the state of the gate or the sync holds anything that JSON cannot.
    """
    drifted = progress.local_steps > 0 or sync.fragments_drifted > 0
    owes = sync.sends_codes and progress.steps_since_exact > 0
    held = {
        "progress": asdict(progress),
        "gate": gate.state_dict(),
        "sync": sync.state_dict(),
        "gate_class": type(gate).__name__,
        "sync_class": type(sync).__name__,
        "sync_keys": [key.name for key in sync.state_keys],
        "fragments_drifted": sync.fragments_drifted,
        "replica": list(replica) if replica.total > 1 and (drifted or owes) else None,
    }
    choices: list[tuple[str, object]] = [("gate", gate), ("sync", sync)]
    for name, choice in choices:
        try:
            json.dumps(held[name])
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"state_dict() of {name}={choice!r} is {held[name]!r}: it must hold numbers, "
                f"strings, lists and dictionaries with string keys only ({error})"
            ) from error
    return json.dumps(held, sort_keys=True)


def read_record(state_dict: Mapping[str, Any]) -> Record:
    """The inverse of :func:`record`, of the one that a state_dict's groups hold.

    Raises:
        TypeError: if this is no state_dict at all.
        ValueError: if the state was saved by an optimizer that is not ours, or is damaged.
    """
    for group in _groups(state_dict):
        for key in ("algorithm", RECORD):
            if key not in group:
                raise ValueError(
                    f"state_dict was not saved by CurvaDion or Dion: a param group lacks the key "
                    f"{key!r}. Load it into the optimizer that saved it."
                )
    text = state_dict["param_groups"][0][RECORD]
    try:
        return _parse(json.loads(text))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"state_dict is damaged: {RECORD!r} in its param groups is {text!r} ({error}). Load "
            f"another checkpoint."
        ) from error


def remember(held: Record, gate: Gate, sync: Sync, *, same_sync: bool) -> None:
    """Give a gate and a sync their saved memories if they are of the saved classes, or change none.

    Raises:
        ValueError: if one of them cannot load its memory.
    """
    before = gate.state_dict(), sync.state_dict()
    memories: list[tuple[str, Gate | Sync, Mapping[str, Any]]] = []
    if held.gate_class == type(gate).__name__:
        memories.append(("gate", gate, held.gate))
    if same_sync:
        memories.append(("sync", sync, held.sync))
    for name, choice, memory in memories:
        try:
            choice.load_state_dict(dict(memory))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            gate.load_state_dict(before[0])
            sync.load_state_dict(before[1])
            raise ValueError(
                f"state_dict holds the memory {memory!r}, which {name}={choice!r} cannot load "
                f"({type(error).__name__}: {error})."
            ) from error


def _groups(state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict={state_dict!r} must be the dictionary that state_dict() returned, got "
            f"{type(state_dict).__name__}"
        )
    groups = state_dict.get("param_groups")
    if groups is None or groups == []:
        raise ValueError("state_dict has no param_groups: it holds no optimizer's state.")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"state_dict['param_groups']={groups!r} must be a list of dictionaries")
    states = state_dict.get("state")
    if not isinstance(states, Mapping):
        raise ValueError(
            f"state_dict['state']={states!r} must be the dictionary of the parameters' states"
        )
    for key, state in states.items():
        if not isinstance(state, Mapping):
            raise ValueError(f"state_dict['state'][{key!r}]={state!r} must be a dictionary")
    return groups


_KINDS = {"gate": dict, "sync": dict, "gate_class": str, "sync_class": str, "sync_keys": list}


def _parse(held: dict[str, Any]) -> Record:
    for name, kind in _KINDS.items():
        if not isinstance(held[name], kind):
            raise TypeError(f"{name} is no {kind.__name__}")
    progress, replica = held["progress"], held["replica"]
    counts = {**progress, "fragments_drifted": held["fragments_drifted"]}
    counts |= dict(zip(("replica", "replicas"), replica or (), strict=False))
    for key, count in counts.items():
        checks.integer(key, count, 0)
    if progress.keys() != {field.name for field in fields(Progress)}:
        raise ValueError(f"progress has the keys {sorted(progress)}")
    if unknown := held.keys() - {field.name for field in fields(Record)}:
        raise ValueError(f"{sorted(unknown)} are unknown")
    whose = None if replica is None else Replica(*replica)
    return Record(**{**held, "progress": Progress(**progress), "replica": whose})
