"""Every metric p2pkv has, declared once. ``Node.counters()`` and ``/metrics`` show the same names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.registry import Collector

from p2pkv.errors import ConfigError


class Metrics:
    """The counters of one node, in a registry of its own so that several nodes fit in a process. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.fetched_pages = self._counter("p2pkv_fetched_pages", "Pages fetched", "source")
        """``source``: own_pool, or the transport that brought them."""
        self.fetched_bytes = self._counter("p2pkv_fetched_bytes", "Bytes of pages fetched", "source")
        self.missed_pages = self._counter("p2pkv_missed_pages", "Pages asked for and not delivered", "reason")
        """``reason``: not_found, rejected, peer_lost, timed_out, unreachable, checksum."""
        self.published_pages = self._counter("p2pkv_published_pages", "Pages published")
        self.published_bytes = self._counter("p2pkv_published_bytes", "Bytes of pages copied into the pool")
        self.unpublished_pages = self._counter(
            "p2pkv_unpublished_pages", "Pages that could not be published", "reason"
        )
        """``reason``: no_room, too_large, no_directory."""
        self.looked_up_pages = self._counter("p2pkv_looked_up_pages", "Pages looked up", "source")
        """``source``: own_pool, location_cache, own_shard, peers."""
        self.evicted_pages = self._counter("p2pkv_evicted_pages", "Pages evicted and retracted from the directory")
        self.reannounced_pages = self._counter(
            "p2pkv_reannounced_pages", "Pages put again after the cluster changed"
        )
        self.transport_fallbacks = self._counter(
            "p2pkv_transport_fallbacks", "Times a peer was not reached over the preferred transport", "transport"
        )
        self.silent_owners = self._counter(
            "p2pkv_silent_owners", "Directory requests a healthy owner did not answer in time"
        )
        self.failed_calls = self._counter(
            "p2pkv_failed_calls",
            "Calls of a serving engine answered with misses because of an error",
            "operation",
            "cause",
        )
        """``operation``: exists, get, set, clear, register. ``cause``: the class of the error."""
        self._server: object | None = None

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def counters(self) -> dict[str, float]:
        """Return every counter by its name, labels in braces: ``p2pkv_fetched_pages_total{source="shm"}``."""
        out: dict[str, float] = {}
        for metric in self.registry.collect():
            for sample in metric.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return out

    def register(self, collector: Collector) -> None:
        """Add a collector that reads its values when asked, such as the pool's."""
        self.registry.register(collector)

    def serve(self, host: str, port: int) -> int:
        """Serve ``/metrics`` on a thread of its own; return the port. Raises :class:`ConfigError` if it is taken."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
        self._server = (server, thread)
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if isinstance(self._server, tuple):
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
        self._server = None
