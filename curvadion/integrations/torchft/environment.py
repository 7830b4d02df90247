"""Arguments of torchft's Manager that the environment gives."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from typing import Any
from urllib.request import ProxyHandler, build_opener

from torch._C._distributed_c10d import TCPStore

PORTS = range(20_000, 32_000)  # for the store of a replica of one process
ATTEMPTS = 50
MOST_DIGITS = 15
# Replicas and the Lighthouse reach each other without one, as torchft's own clients do.
WITHOUT_PROXY = build_opener(ProxyHandler({}))

_stores: list[TCPStore] = []  # which live as long as the process


def chosen_name(replica_id: str | None) -> str | None:
    """The name that was passed, or $REPLICA_GROUP_ID; None without one.

    Raises:
        TypeError: it is no string.
        ValueError: torchft, or the Lighthouse's page, would not take it as it is.
    """
    if replica_id is not None and not isinstance(replica_id, str):
        raise TypeError(f"replica_id={replica_id!r} must be a string")
    key = "replica_id" if replica_id else "REPLICA_GROUP_ID"
    name = replica_id or os.environ.get("REPLICA_GROUP_ID")
    if not name:
        return None
    # torchft computes with the number at the end, in 64 bits.
    digits = len(name) - len(name.rstrip("0123456789"))
    if not name.isprintable() or name != name.strip() or digits > MOST_DIGITS:
        raise ValueError(
            f"{key}={name!r} must be printable characters without spaces around them, and end "
            f"with at most {MOST_DIGITS} digits."
        )
    return name


def manager_arguments() -> dict[str, Any]:
    """Return the Lighthouse's address, this rank and the replica's store.

    The ranks of a replica meet in a store. Several ranks have torchrun's. A single process
    makes its own, because it need not call init_process_group, which may be what hosts the
    store at MASTER_PORT.

    Returns:
        ``lighthouse_addr``, ``rank`` and ``world_size`` inside the replica, ``store_addr``
        and ``store_port``.
    """
    if "TORCHFT_LIGHTHOUSE" not in os.environ:
        raise ValueError(
            "TORCHFT_LIGHTHOUSE is not set: start torchft_lighthouse, and set it to the "
            "address, such as http://host:29510."
        )
    lighthouse = os.environ["TORCHFT_LIGHTHOUSE"]
    if not lighthouse.startswith(("http://", "https://")):
        raise ValueError(
            f"TORCHFT_LIGHTHOUSE={lighthouse!r} must begin with http://, as in http://host:29510."
        )
    single = os.environ.get("WORLD_SIZE", "1") == "1"
    if single or "MASTER_ADDR" not in os.environ:
        host = socket.gethostname()
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:  # torch's client would try for five minutes
            raise ValueError(
                f"This host's name {host!r}, which replicas tell each other, has no address "
                f"({error}): add it to /etc/hosts, or set a hostname that others can resolve."
            ) from error
        return {
            "lighthouse_addr": lighthouse,
            "rank": 0,
            "world_size": 1,
            "store_addr": host,
            "store_port": _port_of_a_new_store(),
        }
    return {
        "lighthouse_addr": lighthouse,
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "store_addr": os.environ["MASTER_ADDR"],
        "store_port": int(os.environ["MASTER_PORT"]),
    }


def _port_of_a_new_store() -> int:
    """Start a store in this process; return its port.

    The system does not choose the port, because it may choose one at which another program
    listens at another of this machine's addresses.
    """
    for port in random.SystemRandom().sample(PORTS, ATTEMPTS):
        with suppress(RuntimeError):  # the port is in use
            store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
            _stores.append(store)
            return port
    raise RuntimeError(
        f"no port between {PORTS.start} and {PORTS.stop} is free, of {ATTEMPTS} that were "
        f"tried: end programs that listen there."
    )
