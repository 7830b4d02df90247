"""Links between two replicas on loopback, which can be cut while these connect.

No proxy fits between two replicas: all find a third one at the same address. But each reads for
itself from a store where the others are, so whoever is cut off is found where nobody listens.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torchft import process_group

BY_RANK = "0/"  # the prefix of gloo's addresses
# gloo lets the one with the larger address connect, so both wait for the other one.
LARGEST = socket.inet_aton("127.255.255.254")


def go_by_links(slot: int, cut_off: Sequence[int], ports: Sequence[int]) -> None:
    """Let this process, a replica, heed cuts whenever it connects to others.

    Args:
        slot: the replica's number.
        cut_off: by replica, whether this one cannot reach it; may change at any time.
        ports: by replica, of the store at which others meet if it is the first.
    """
    connect = process_group.create_store_client
    silent = socket.create_server(("127.0.0.1", 0), backlog=1000)

    def connect_if_linked(address: str, timeout: timedelta) -> Store:
        where, _, prefix = address.partition("/")
        port = where.rpartition(":")[2]
        if any(off and int(port) == of for off, of in zip(cut_off, ports, strict=True)):
            address = f"127.0.0.1:{silent.getsockname()[1]}/{prefix}"
        return Addresses(slot, cut_off, connect(address, timeout))

    process_group.create_store_client = connect_if_linked


class Addresses(Store):
    """A store in which a replica does not find those from which it is cut off.

    Args:
        slot: the replica's number.
        cut_off: by replica, whether this one cannot reach it.
        store: the one at which the members meet.
    """

    def __init__(self, slot: int, cut_off: Sequence[int], store: Store) -> None:
        super().__init__()
        self._slot = slot
        self._cut_off = cut_off
        self._store = store

    def set(self, key: str, value: Any) -> None:
        """Set a key; with an address, also whose it is."""
        if key.startswith(BY_RANK):
            self._store.set(f"slot of {key}", str(self._slot))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key; of one from which this replica is cut off, another address."""
        value = self._store.get(key)
        if not key.startswith(BY_RANK) or not self._cut_off[int(self._store.get(f"slot of {key}"))]:
            return value
        address = bytearray(value)
        ip = 20 + int.from_bytes(address[:8], "little")  # after a host, a family and a port
        address[ip : ip + 4] = LARGEST
        return bytes(address)

    def wait(self, *what: Any) -> None:
        """Wait for keys."""
        self._store.wait(*what)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the store."""
        self._store.set_timeout(timeout)
