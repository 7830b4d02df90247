"""How far a run has come, and the text in which a checkpoint holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from curvadion.comm.replicas import Replica
from curvadion.gates import Gate
from curvadion.sync.base import Sync
from curvadion.sync.decision import Signal
from curvadion.update.hyperparameters import RECORD

# Names of earlier versions: the values of reconcile=, and classes.
_KINDS_OF_SIGNAL = {"signal": float, "signal_parameter": str}


@dataclass
class Progress:
    """How far a run has come; the same on every replica, unless said otherwise.

    Attributes:
        steps: steps taken, skipped ones included.
        local_steps: steps since the replicas last synchronised.
        skipped_in_a_row: steps skipped for a non-finite gradient since the last that was not;
            each replica's own under a schedule and with a gate that decides one step late.
        steps_since_exact: steps since all state was last the same on all replicas.
        uneven_steps: steps since replicas last came together at which this one may have moved
            other parameters than the others; its own.
        looks: steps at which replicas might look whether something else averages their gradients.
        signal: the gate's largest signal of the step before, with a gate that decides one step
            late; None if there is none. signal_parameter: the name of the parameter that had it.
    """

    steps: int = 0
    local_steps: int = 0
    skipped_in_a_row: int = 0
    steps_since_exact: int = 0
    uneven_steps: int = 0
    looks: int = 0
    signal: float | None = None
    signal_parameter: str | None = None

    @property
    def signal_told(self) -> Signal | None:
        """The signal, with the name of its parameter."""
        return None if self.signal is None else Signal(self.signal, self.signal_parameter)

    def with_signal(self, signal: Signal | None) -> Progress:
        """A copy that has another signal; itself for None."""
        if signal is None:
            return self
        return replace(self, signal=signal.largest, signal_parameter=signal.parameter)

    @property
    def alike(self) -> dict[str, Any]:
        """What is the same on all replicas."""
        own = {"skipped_in_a_row", "uneven_steps"}
        return {key: value for key, value in asdict(self).items() if key not in own}


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds besides groups and tensors.

    Attributes:
        progress: of the run.
        gate, sync: their memories (``state_dict()``).
        gate_class, sync_class: the names of their classes.
        sync_keys: the state keys that only this sync kind knows.
        group_defaults: what None stood for in the group keys whose default depends on the sync.
        replica: the one that saved it, if it cannot stand for all.
        fragments_apart: how many fragments of the weights had moved since replicas agreed on them.
        sends_codes: whether codes may owe something to the weights even if these agree.

    Values are None in checkpoints of versions that did not write them.
    """

    progress: Progress
    gate: dict[str, Any]
    sync: dict[str, Any]
    gate_class: str | None = None
    sync_class: str | None = None
    sync_keys: list[str] | None = None
    group_defaults: dict[str, Any] | None = None
    replica: Replica | None = None
    fragments_apart: int = 0
    sends_codes: bool = False

    @property
    def apart(self) -> bool:
        """Whether replicas, if there were several, held different weights."""
        return self.progress.local_steps > 0 or self.fragments_apart > 0

    @property
    def differs(self) -> bool:
        """Whether it cannot stand for all replicas, as far as the version that saved it tells."""
        return self.apart or (self.sends_codes and self.progress.steps_since_exact > 0)

    @property
    def complete(self) -> bool:
        """Whether the version that saved it wrote all there is to know."""
        return self.sync_class is not None and self.group_defaults is not None


def record(
    progress: Progress,
    gate: Gate,
    sync: Sync,
    group_defaults: Mapping[str, Any],
    replica: Replica,
) -> str:
    """A :class:`Record` as JSON text: one leaf, which checkpoint tools keep whole.

    (They flatten dictionaries, lose empty ones, and load only the keys that exist already.)

    Raises:
        TypeError: if the state of the gate or the sync holds anything that JSON cannot.
    """
    memories = {"gate": gate.state_dict(), "sync": sync.state_dict()}
    held: dict[str, Any] = {
        **asdict(progress),
        "gate": memories["gate"],
        "gate_class": type(gate).__name__,
        "sync": memories["sync"],
        "fragments_apart": sync.fragments_apart,
        "sends_codes": sync.sends_codes,
        "sync_class": type(sync).__name__,
        "sync_keys": [key.name for key in sync.state_keys],
        "group_defaults": dict(group_defaults),
    }
    apart = progress.local_steps or sync.fragments_apart
    if replica.total > 1 and (apart or (sync.sends_codes and progress.steps_since_exact)):
        held["replica"] = list(replica)
    for name, choice in (("gate", gate), ("sync", sync)):
        try:
            json.dumps(memories[name])
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"state_dict() of {name}={choice!r} is {memories[name]!r}: it must hold numbers, "
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


def remember(held: Record, gate: Gate, sync: Sync, of_sync: Mapping[str, Any]) -> None:
    """Give a gate and a sync their saved memories, or change neither.

    Args:
        held: whose gate's memory counts if the gate here is of its class.
        gate: of the optimizer that loads.
        sync: likewise.
        of_sync: what the sync is to remember.

    Raises:
        ValueError: if one of them cannot load its memory.
    """
    before = gate.state_dict(), sync.state_dict()
    memories: list[tuple[str, Gate | Sync, Mapping[str, Any]]] = [("sync", sync, of_sync)]
    if held.gate and held.gate_class in (None, type(gate).__name__):
        memories.insert(0, ("gate", gate, held.gate))
    for name, choice, memory in memories:
        try:
            choice.load_state_dict(dict(memory))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            gate.load_state_dict(before[0])
            sync.load_state_dict(before[1])
            if choice is sync or held.gate_class is not None:
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
    gate, sync, replica = held.pop("gate"), held.pop("sync"), held.pop("replica", None)
    fragments_apart, sends_codes = held.pop("fragments_apart", 0), held.pop("sends_codes", False)
    kinds = {"gate_class": str, "sync_class": str, "sync_keys": list, "group_defaults": dict}
    rest = {key: held.pop(key, None) for key in kinds}
    wrong = [k for k, kind in kinds.items() if not isinstance(rest[k], (kind, type(None)))]
    if wrong or not isinstance(gate, dict) or not isinstance(sync, dict):
        raise TypeError("a value has the wrong type")
    if unknown := sorted(held.keys() - {field.name for field in fields(Progress)}):
        raise ValueError(f"this version does not know {unknown}")
    if missing := sorted({"steps", "local_steps"} - held.keys()):
        raise ValueError(f"{missing} are missing")
    signal = {key: held.pop(key, None) for key in ("signal", "signal_parameter")}
    if not all(isinstance(signal[k], kind | None) for k, kind in _KINDS_OF_SIGNAL.items()):
        raise TypeError(f"{signal} must be a number and a name")
    _check_counts({**held, "fragments_apart": fragments_apart})
    _check_counts({"fragments_apart": sync.get("fragments_apart", 0)})
    for value in replica or ():
        _check_counts({"replica": value})
    whose = None if replica is None else Replica(*replica)
    return Record(
        Progress(**held, **signal),
        gate,
        sync,
        replica=whose,
        fragments_apart=fragments_apart,
        sends_codes=bool(sends_codes),
        **rest,
    )


def _check_counts(held: Mapping[str, Any]) -> None:
    for key, value in held.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TypeError(f"{key}={value!r} must be an integer >= 0")
