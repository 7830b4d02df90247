"""Who is alive, by the status page of the Lighthouse."""

from __future__ import annotations

import html
import re
from http.client import HTTPException

from curvadion.integrations.torchft.environment import WITHOUT_PROXY

# An item of the page's list. "old" marks heartbeats that count as missed.
HEARTBEAT = re.compile(r'<li class="heartbeat\s*(old)?\s*">\s*(.+): seen ')
TIMEOUT = 10.0  # seconds


def living(lighthouse: str, timeout: float = TIMEOUT) -> set[str]:
    """Identifiers of the replicas that count as alive, whether they take part or not.

    torchft's clients only tell who takes part.

    Args:
        lighthouse: its address, such as http://host:29510.
        timeout: seconds until it counts as unreachable.

    Raises:
        OSError: the page cannot be read.
    """
    try:
        address = f"{lighthouse.rstrip('/')}/status"
        with WITHOUT_PROXY.open(address, timeout=timeout) as answer:
            page = answer.read().decode()
    except (HTTPException, UnicodeDecodeError) as error:  # it has died while it answered
        raise OSError(f"this is no page of a Lighthouse: {error!r}") from error
    return {html.unescape(name) for old, name in HEARTBEAT.findall(page) if not old}
