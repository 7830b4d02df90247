"""States of an optimizer as version 0.1.0 wrote them, which called much by other names."""

from __future__ import annotations

import json

NEW = {"spectrum", "spectrum_weight"}
OLD_NAMES = {"anchor": "weight_agreed", "residual": "weight_residual"}


def old_record(text):
    """The text of a group's key ``progress``."""
    held = json.loads(text)
    sync, kind = held.pop("sync"), held.pop("sync_class")
    del held["sync_keys"]
    held["part"] = sync.get("next_fragment", 0)
    held["parts_apart"] = sync["fragments_apart"]
    held["reconcile"] = "quantized" if kind == "QuantizedAverage" else "average"
    held["defaults_by_sync"] = held.pop("group_defaults")
    held["gate_class"] = {"ByteBudget": "WireBudget"}.get(held["gate_class"], held["gate_class"])
    return json.dumps(held, sort_keys=True)


def old_state(state, lr_sum):
    """One parameter's state; lr_sum: of the learning rates of its group's steps."""
    old = {OLD_NAMES.get(key, key): value for key, value in state.items() if key not in NEW}
    if "lr_since_anchor" in old:
        old["lr_at_agreement"] = lr_sum - old.pop("lr_since_anchor")
    return old


def old_state_dict(saved, lr_sum):
    """Of ``optimizer.state_dict()`` or ``get_optimizer_state_dict()``."""
    groups = [
        {**group, "progress": old_record(group["progress"]), "lr_sum": lr_sum}
        for group in saved["param_groups"]
    ]
    states = {key: old_state(state, lr_sum) for key, state in saved["state"].items()}
    return {**saved, "state": states, "param_groups": groups}


def old_flattened(saved, lr_sum):
    """Of ``get_optimizer_state_dict()`` with ``flatten_optimizer_state_dict``."""
    old = {}
    for path, value in saved.items():
        prefix, _, name = path.rpartition(".")
        held = {name: value}
        if path.startswith("state."):
            held = old_state(held, lr_sum)
        elif name == "progress":
            held = {name: old_record(value), "lr_sum": lr_sum}
        old |= {f"{prefix}.{key}": value for key, value in held.items()}
    return old
