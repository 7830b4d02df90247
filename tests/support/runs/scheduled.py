"""Gates that open at given steps, or after given changes."""

from __future__ import annotations

from curvadion import RMMC, Gate

STEPS = 10
OPEN_STEPS = (1, 2, 5, 9)


class Scheduled(Gate):
    """Opens at the listed steps, counted from 1."""

    def __init__(self, steps):
        self.open_steps, self.asked = steps, 0

    def opens(self, signal, local_steps):
        self.asked += 1
        return self.asked in self.open_steps


class Watching(Scheduled):
    """Opens as scheduled, and remembers the RMMC that it saw."""

    def __init__(self, steps):
        super().__init__(steps)
        self.seen = []

    def signal(self, before, after):
        return RMMC(0.0).signal(before, after)

    def opens(self, signal, local_steps):
        self.seen.append(signal)
        return super().opens(signal, local_steps)


class Patient(Gate):
    """Opens when the changes of momenta since it last did add up to ``enough``.

    It remembers every signal, and by step after how many local steps it opened.
    """

    reason = "patience"

    def __init__(self, enough=0.0):
        self.enough, self.held, self.signals, self.openings = enough, 0.0, [], {}

    def signal(self, before, after):
        return (after - before).abs()

    def opens(self, signal, local_steps):
        self.signals.append(signal)
        self.held += signal
        if self.held < self.enough:
            return False
        self.held = 0.0
        self.openings[f"step {len(self.signals)}"] = local_steps
        return True

    def state_dict(self):
        return {"held": self.held, "signals": self.signals, "openings": self.openings}

    def load_state_dict(self, state):
        self.held, self.signals, self.openings = (state[key] for key in self.state_dict())
