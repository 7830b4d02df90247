"""Gates without an optimizer."""

from __future__ import annotations


def ask(gate, steps, *, signals=None, opened_by_others=()):
    """The steps at which a gate opens; something else opens it at others too."""
    openings, local_steps = [], 0
    for step in range(steps):
        signal = 1.0 if signals is None else signals[step]
        opens = gate.opens(signal, local_steps) or step in opened_by_others
        local_steps += 1
        if opens:
            gate.spend(1)
            openings.append(step)
            local_steps = 0
    return openings
