"""What steps raise."""

from __future__ import annotations


def told(steps, take):
    """The step at which take(step) raises a RuntimeError or ValueError, and its text."""
    for step in range(steps):
        try:
            take(step)
        except (RuntimeError, ValueError) as error:
            return step, str(error)
    return None
