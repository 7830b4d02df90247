"""A page of this process's numbers, which Prometheus reads (the extra ``prometheus``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from curvadion import checks
from curvadion.metering.events import Event
from curvadion.metering.report import TOTALS

MEANINGS = {
    "step": "the last step",
    "steps": "steps that this process has taken",
    "wire_bytes": "payload of a step's collectives in this process, on average",
    "open_gate_share": "share of the steps at which replicas synchronised",
    "skipped_steps": "steps skipped for a gradient that is not finite",
    "waited_seconds": "seconds of waiting for late means of a delay",
    "opening_seconds": "seconds for which other replicas held up this one",
    "step_seconds": "seconds of a step, from end to end, on average",
    "members": "replicas at the last opening",
    "share": "bytes sent to other replicas since the run began, of those of DDP",
    "rmmc": "the largest change of a momentum that the gate has read",
    "threshold": "with which the gate compares it",
    "local_steps": "steps since the replicas synchronised",
    "disagreement": "|D_i - D| / |D| at the last opening",
    "residual": "|e| / |D| at the last opening",
    "progress": "|D / L| at the last opening",
    "cosine": "cosine of the last mean with that before it",
}


class PrometheusWriter:
    """Serves the numbers as ``curvadion_...`` at http://host:port/metrics.

    Events are counted by kind, in ``curvadion_events_total``. Needs ``pip install
    'curvadion[prometheus]'``.

    Args:
        port: to listen at; 0 chooses a free one.
        address: of the network interface; all by default. There is no password.

    Attributes:
        port: at which it listens.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int = 9464, address: str = "0.0.0.0") -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        checks.integer("port", port, 0, 65535)
        # Its own registry: it serves what this writer writes, and nothing of other libraries.
        self._registry = CollectorRegistry()
        self._events = Counter(
            "curvadion_events", "events by kind", ["kind"], registry=self._registry
        )
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._server, self._thread = start_http_server(port, address, self._registry)
        self.port: int = self._server.server_port

    def write(self, step: int, scalars: Mapping[str, float], events: Sequence[Event]) -> None:
        """As :class:`curvadion.metering.watch.Writer` says."""
        from prometheus_client import Counter, Gauge

        for name, value in {"step": float(step), **scalars}.items():
            metric = f"curvadion_{name}"
            meaning = MEANINGS.get(name, name)
            if name in TOTALS:
                if name not in self._counters:
                    self._counters[name] = Counter(metric, meaning, registry=self._registry)
                self._counters[name].inc(value)
            else:
                if name not in self._gauges:
                    self._gauges[name] = Gauge(metric, meaning, registry=self._registry)
                self._gauges[name].set(value)
        for event in events:
            self._events.labels(kind=event.kind).inc()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
