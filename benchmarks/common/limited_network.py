"""A network of namespaces on this machine with a given bandwidth and delay; needs root.

Every rank has its own namespace with one interface. The other ends meet in a hub namespace, joined
by a bridge or, with a delay, by a process that forwards frames when they are due, because not every
kernel has a queueing discipline for that. Everything lives in these namespaces, so removing them
removes everything.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

INTERFACE = "rank0"
PREFIX = "curvadion-link"
MTU = 9000  # large, so that the relay handles few frames per second
BURST = MTU + 100  # one frame: a larger burst would let small messages pass unlimited


class Network:
    """The namespaces of all ranks; made by :func:`network`."""

    def __init__(self, ranks: int, congestion_control: str) -> None:
        self.ranks = ranks
        self.congestion_control = congestion_control
        self._relay: subprocess.Popen[bytes] | None = None

    def namespace(self, rank: int) -> str:
        """The name of a rank's namespace."""
        return f"{PREFIX}-{os.getpid()}-{rank}"

    @property
    def hub(self) -> str:
        """The name of the namespace where the links meet."""
        return f"{PREFIX}-{os.getpid()}-hub"

    def address(self, rank: int) -> str:
        """A rank's IPv4 address."""
        return f"10.231.0.{rank + 1}"

    def start(self, rank: int, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a module as a rank's worker, ``--worker RANK --worlds RANKS``, on pipes."""
        environment = os.environ | {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            f"ip netns exec {self.namespace(rank)} {sys.executable} -m {module} "
            f"--worker {rank} --worlds {self.ranks} {' '.join(arguments)}".split(),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def build(self) -> None:
        """Create the namespaces and join them without limits."""
        _ip(f"netns add {self.hub}")
        _ip(f"-n {self.hub} link add bridge0 type bridge")
        _ip(f"-n {self.hub} link set bridge0 mtu {MTU} up")
        for rank in range(self.ranks):
            name = self.namespace(rank)
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
            _ip(
                f"netns exec {name} sysctl -qw "
                f"net.ipv4.tcp_congestion_control={self.congestion_control}"
            )
            _ip(
                f"link add {INTERFACE} netns {name} mtu {MTU} type veth "
                f"peer name {_port(rank)} netns {self.hub} mtu {MTU}"
            )
            _ip(f"-n {name} link set {INTERFACE} address {_hardware_address(rank)}")
            _ip(f"-n {name} addr add {self.address(rank)}/24 dev {INTERFACE}")
            _ip(f"-n {name} link set {INTERFACE} up")
            _ip(f"-n {self.hub} link set {_port(rank)} master bridge0 up")

    def limit(self, bandwidth: float | None, delay: float) -> None:
        """Limit every rank to ``bandwidth`` bits per second (None: no limit).

        Args:
            bandwidth: of each rank's sending side.
            delay: seconds from any rank to any other.
        """
        self._end_relay()
        for rank in range(self.ranks):
            where = f"-n {self.namespace(rank)}"
            with suppress(RuntimeError):
                _tc(f"{where} qdisc delete dev {INTERFACE} root")
            if bandwidth is not None:
                _tc(
                    f"{where} qdisc add dev {INTERFACE} root tbf "
                    f"rate {bandwidth:.0f}bit burst {BURST}b limit {64 * 1024 * 1024}b"
                )
            master = "master bridge0" if delay == 0 else "nomaster"
            _ip(f"-n {self.hub} link set {_port(rank)} {master}")
        if delay:
            self._relay = subprocess.Popen(
                f"ip netns exec {self.hub} {sys.executable} -m {__name__} "
                f"{self.ranks} {delay}".split()
            )

    def remove(self) -> None:
        """Remove everything that :meth:`build` and :meth:`limit` made."""
        self._end_relay()
        for name in [self.hub, *map(self.namespace, range(self.ranks))]:
            _remove(name)

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            self._relay = None


@contextmanager
def network(ranks: int, congestion_control: str) -> Iterator[Network]:
    """Namespaces for ``ranks`` ranks, removed at the end, also after errors and on SIGTERM.

    Leftovers of a killed run are removed first. ``congestion_control`` is TCP's.

    Raises:
        PermissionError: without the rights of root.
        RuntimeError: if the kernel lacks a feature.
    """
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root: run this with sudo, or as root")
    _remove_leftovers()
    made = Network(ranks, congestion_control)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        made.build()
        yield made
    finally:
        signal.signal(signal.SIGTERM, before)
        made.remove()


def ask(workers: Sequence[subprocess.Popen[str]], line: str) -> list[Any]:
    """Write a line to every worker and return their answers, parsed as JSON.

    Raises:
        RuntimeError: if a worker has ended.
    """
    for process in workers:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    answers = []
    for rank, process in enumerate(workers):
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"rank {rank} ended with exit code {process.wait()}; see above")
        answers.append(json.loads(answer))
    return answers


def bytes_sent() -> int:
    """Return the bytes this rank's interface has sent, with headers and acknowledgements."""
    for line in Path("/proc/self/net/dev").read_text("utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"{INTERFACE} is not in /proc/self/net/dev: this is no rank's process")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _remove_leftovers() -> None:
    listed = _ip("netns list").split()
    for name in listed:
        owner = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if name.startswith(f"{PREFIX}-") and not Path("/proc", owner).exists():
            _remove(name)


def _remove(name: str) -> None:
    with suppress(RuntimeError):
        _ip(f"netns delete {name}")


def _port(rank: int) -> str:
    return f"port{rank}"


def _hardware_address(rank: int) -> str:
    return f"02:00:00:00:00:{rank:02x}"


def _ip(arguments: str) -> str:
    return _command("ip", arguments)


def _tc(arguments: str) -> str:
    return _command("tc", arguments)


def _command(name: str, arguments: str) -> str:
    done = subprocess.run([name, *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} {arguments} failed: {done.stderr.strip()}")
    return done.stdout


# ---------------------------------------------------------------- the relay process

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15  # frames in the kernel's own form: unsegmented, without checksum
_PACKET_IGNORE_OUTGOING = 23
_VNET_HEADER = 10
_EVERYTHING = 3


def relay(ranks: int, delay: float) -> None:
    """Forward frames between the ports of this namespace, each after ``delay`` seconds."""
    with suppress(PermissionError):  # a late frame is a longer delay
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ports = [_open_port(rank) for rank in range(ranks)]
    due: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select(ports, [], [], wait)
        now = time.monotonic()
        for port in ready:
            source = ports.index(port)
            with suppress(BlockingIOError):
                for _ in range(32):
                    frame = port.recv(1 << 17)
                    due.extend((now + delay, t, frame) for t in _targets(frame, source, ranks))
        while due and due[0][0] <= now:
            _, target, frame = due.popleft()
            with suppress(OSError):  # a full queue drops a frame, as links do
                ports[target].send(frame)


def _open_port(rank: int) -> Any:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    port.bind((_port(rank), _EVERYTHING))
    port.setblocking(False)
    return port


def _targets(frame: bytes, source: int, ranks: int) -> Sequence[int]:
    destination = frame[_VNET_HEADER : _VNET_HEADER + 6]
    if destination[0] & 1:  # broadcast
        return [rank for rank in range(ranks) if rank != source]
    return [destination[5]] if destination[0] == 2 and destination[5] < ranks else []


if __name__ == "__main__":
    relay(int(sys.argv[1]), float(sys.argv[2]))
