"""Arguments of torchft's Manager that the environment gives."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import TCPStore

PORTS = range(20_000, 32_000)  # for the store of a replica of one process
ATTEMPTS = 50

_stores: list[TCPStore] = []  # which live as long as the process


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
        return {
            "lighthouse_addr": lighthouse,
            "rank": 0,
            "world_size": 1,
            "store_addr": socket.gethostname(),
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
