"""How far a run has come, and the text in which a checkpoint holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from curvadion.gates import Gate


@dataclass
class Progress:
    """How far a run has come; the same on every replica.

    Attributes:
        steps: steps taken, skipped ones included.
        local_steps: steps since the replicas last synchronised.
        skipped_in_a_row: steps skipped for a non-finite gradient since the last that was not.
        part: of the parameters, the one that comes together when the gate opens next.
        parts_apart: so many parts, from that one on, have moved since replicas agreed on them.
        steps_since_exact: steps since all state was last the same on all replicas.
    """

    steps: int = 0
    local_steps: int = 0
    skipped_in_a_row: int = 0
    part: int = 0
    parts_apart: int = 0
    steps_since_exact: int = 0

    @property
    def apart(self) -> bool:
        """Whether replicas, if there are several, have taken steps of their own since they met."""
        return self.local_steps > 0 or self.parts_apart > 0

    def differs(self, reconcile: str) -> bool:
        """Whether one replica's state, if there are several, cannot stand for all.

        With reconcile="quantized" that is so even if weights agree: what codes have lost is each
        replica's own, and all of it is owed to the weights.
        """
        return self.apart or (reconcile == "quantized" and self.steps_since_exact > 0)


class Replica(NamedTuple):
    """One of several replicas."""

    number: int
    total: int


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds besides groups and tensors.

    Attributes:
        progress: of the run.
        memory: the gate's.
        gate_class: the name of the gate's class.
        reconcile: how the replicas came together.
        defaults_by_sync: what None stood for in the arguments whose default depends on how the
            replicas come together.
        replica: the one that saved it, if it cannot stand for all.

    The last four are None in checkpoints of versions that did not write them.
    """

    progress: Progress
    memory: dict[str, Any]
    gate_class: str | None = None
    reconcile: str | None = None
    defaults_by_sync: dict[str, Any] | None = None
    replica: Replica | None = None

    @property
    def differs(self) -> bool:
        """Whether it cannot stand for all replicas, as far as the version that saved it tells."""
        return self.progress.differs(self.reconcile or "")

    @property
    def complete(self) -> bool:
        """Whether the version that saved it wrote all there is to know."""
        return self.reconcile is not None and self.defaults_by_sync is not None


def record(
    progress: Progress,
    gate: Gate,
    reconcile: str,
    defaults_by_sync: Mapping[str, Any],
    replica: Replica,
) -> str:
    """A :class:`Record` as JSON text: one leaf, which checkpoint tools keep whole.

    (They flatten dictionaries, lose empty ones, and load only the keys that exist already.)

    Raises:
        TypeError: if the gate's state holds what JSON cannot.
    """
    state = gate.state_dict()
    held: dict[str, Any] = {
        **asdict(progress),
        "gate": state,
        "gate_class": type(gate).__name__,
        "reconcile": reconcile,
        "defaults_by_sync": dict(defaults_by_sync),
    }
    if progress.differs(reconcile) and replica.total > 1:
        held["replica"] = list(replica)
    try:
        return json.dumps(held, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"state_dict() of gate={gate!r} is {state!r}: it must hold numbers, strings, lists and "
            f"dictionaries with string keys only ({error})"
        ) from error


def read_record(state_dict: Mapping[str, Any]) -> Record:
    """The inverse of :func:`record`, of the one that a state_dict's groups hold.

    Raises:
        TypeError: if this is no state_dict at all.
        ValueError: if the state was saved by an optimizer that is not ours, or is damaged.
    """
    for group in _groups(state_dict):
        for key in ("algorithm", "progress"):
            if key not in group:
                raise ValueError(
                    f"state_dict was not saved by CurvaDion or Dion: a param group lacks the key "
                    f"{key!r}. Load it into the optimizer that saved it."
                )
    text = state_dict["param_groups"][0]["progress"]
    try:
        return _parse(json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"state_dict is damaged: 'progress' in its param groups is {text!r} ({error}). Load "
            f"another checkpoint."
        ) from error


def _groups(state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict={state_dict!r} must be the dictionary that state_dict() returned, got "
            f"{type(state_dict).__name__}"
        )
    groups = state_dict.get("param_groups")
    if not groups:
        raise ValueError("state_dict has no param_groups: it holds no optimizer's state.")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"state_dict['param_groups']={groups!r} must be a list of dictionaries")
    if not isinstance(state_dict.get("state"), Mapping):
        raise ValueError(
            f"state_dict['state']={state_dict.get('state')!r} must be the dictionary of the "
            f"parameters' states"
        )
    return groups


def _parse(held: dict[str, Any]) -> Record:
    memory, replica = held.pop("gate"), held.pop("replica", None)
    rest = {key: held.pop(key, None) for key in ("gate_class", "reconcile", "defaults_by_sync")}
    kinds = zip((memory, *rest.values()), (dict, str, str, dict), strict=True)
    if not all(isinstance(value, kind) for value, kind in kinds if value is not None):
        raise TypeError("a value has the wrong type")
    if unknown := sorted(held.keys() - {field.name for field in fields(Progress)}):
        raise ValueError(f"this version does not know {unknown}")
    if missing := sorted({"steps", "local_steps"} - held.keys()):
        raise ValueError(f"{missing} are missing")
    for key, value in [*held.items(), *(("replica", value) for value in replica or ())]:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TypeError(f"{key}={value!r} must be an integer >= 0")
    whose = None if replica is None else Replica(*replica)
    return Record(Progress(**held), memory, replica=whose, **rest)
