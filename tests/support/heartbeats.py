"""A router that only listens, and the HTTP side of an engine, for tests of what engines tell routers."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from p2pkv.control.secret import cluster_keys
from p2pkv.instances.heartbeat import Heartbeat, unpack


class Listener:
    """Takes heartbeats at ``address``, under the keys of this user's own secret."""

    def __init__(self) -> None:
        keys = cluster_keys(None)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.private
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"127.0.0.1:{port}"

    def hear(self, is_meant: Callable[[Heartbeat], bool], seconds: float = 30.0) -> Heartbeat:
        """Return the next heartbeat that is meant; those before it are forgotten."""
        until = time.monotonic() + seconds
        while self._socket.poll(max(0.0, until - time.monotonic()) * 1e3):
            heartbeat = unpack(self._socket.recv())
            if is_meant(heartbeat):
                return heartbeat
        raise AssertionError(f"not heard within {seconds} s")

    def is_silent(self) -> bool:
        """Whether nothing has come."""
        return not self._socket.poll(0)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class EnginePages(http.server.BaseHTTPRequestHandler):
    """``/health``, with ``status``, and ``/metrics`` of an engine."""

    status = 200
    page = (
        b'vllm:num_requests_running{engine="0"} 3.0\n'
        b"sglang:num_queue_reqs 2.0\n"
        b"vllm:num_requests_waiting_x 9\n"  # means something else
    )

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(self.page if self.path == "/metrics" else b"")

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Serve ``/health`` and ``/metrics`` as an engine does that has 3 requests, and 2 more that wait; yield its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EnginePages) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
