"""Gates that open at given steps."""

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
