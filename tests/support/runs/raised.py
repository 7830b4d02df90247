"""What steps raise."""


def by(kinds, function, *args, **kwargs):
    """The text of an error of these kinds that a call raises; None if it raises none."""
    try:
        function(*args, **kwargs)
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return None


def told(steps, take):
    """The step at which take(step) raises a RuntimeError or ValueError, and its text."""
    for step in range(steps):
        try:
            take(step)
        except (RuntimeError, ValueError) as error:
            return step, str(error)
    return None
