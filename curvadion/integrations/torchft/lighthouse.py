"""Who is alive, by the status page of the Lighthouse."""

from __future__ import annotations

import html
import re
from urllib.request import ProxyHandler, build_opener

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
    # As torchft's clients, which use no proxy either.
    opener = build_opener(ProxyHandler({}))
    with opener.open(f"{lighthouse.rstrip('/')}/status", timeout=timeout) as answer:
        page = answer.read().decode()
    return {html.unescape(name) for old, name in HEARTBEAT.findall(page) if not old}
