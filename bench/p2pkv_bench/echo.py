"""The least that a question and an answer cost over ZMQ with CURVE: libzmq sends back what it gets, without the GIL."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from p2pkv.control.sockets import Socket
from p2pkv.control.wire import HEADER
from p2pkv.page import KEY_BYTES, LOCATION

if TYPE_CHECKING:
    from typing_extensions import Self


class EchoServer:
    """Admits whoever knows its key: what it tells nobody needs to hide."""

    def __init__(self) -> None:
        public, private = zmq.curve_keypair()
        self.public = public.decode()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_secretkey = private
        self._socket.curve_publickey = public
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="p2pkv-bench-echo", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # from a socket to itself: whoever sends something gets it back
        with self._socket, suppress(zmq.ContextTerminated):
            zmq.proxy(self._socket, self._socket)

    def close(self) -> None:
        self._context.term()  # ends the proxy, and returns when the thread has closed the socket
        self._thread.join()


class EchoClient:
    """Asks one question at a time, and gets it back."""

    def __init__(self, address: str, server_key: str) -> None:
        public, private = zmq.curve_keypair()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = 10_000
        self._socket.curve_serverkey = server_key.encode()
        self._socket.curve_secretkey = private
        self._socket.curve_publickey = public
        self._socket.connect(address)

    @staticmethod
    def question(n_keys: int) -> bytes:
        """Return half of the bytes that a look-up of ``n_keys`` and an answer that has found all of them have."""
        n_question = HEADER.size + n_keys * KEY_BYTES
        n_answer = HEADER.size + n_keys * (1 + LOCATION.itemsize)
        return bytes((n_question + n_answer) // 2)

    def ask(self, question: bytes) -> bytes:
        self._socket.send(question)
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
