"""Calls to the servers of a store over HTTP and JSON: one at a time, to the server that answered last.

Nothing is sent twice by itself: what fails says so, and the next call goes to the next server. A call is over at its
deadline, whatever the server does: looking its name up, connecting, asking and the whole answer share it. Certificates
are read at each connection, so that renewed ones are used. One thread calls; :meth:`HttpCalls.interrupt` is for any.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from p2pkv.control.host_names import Names
from p2pkv.directory.registry.files import require_file
from p2pkv.directory.registry.timed_socket import TimedSocket
from p2pkv.errors import RegistryError

_MAX_BODY = 64 << 20
"""No store's list is larger: 4,096 records of 8 KiB, and what JSON makes of them."""
_MOST_PATIENCE_S = 60.0
"""Whatever a server asks for."""
_REST_OF_LINE_S = 5.0
"""What a line of a stream may take from its first byte on. It is a guess: mostly a line is a record or two."""
_FRESH_S = 2.0
"""Until the name of a server is looked up again, so that calls in a row do it once."""

_OUT_OF_DATE = frozenset({9, 10})
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
_OF_ANOTHER_NAME = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered: the HTTP status, and the JSON of the body."""

    status: int
    body: dict[str, Any]
    retry_after: float = 1.0
    """Seconds that the server wants to be left alone for, where it has too much to do."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; without ``ca`` those authorities count that this machine trusts."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Read them. Raises :class:`~p2pkv.errors.RegistryError` for what can't be read."""
        path = self.ca
        try:
            for each in filter(None, (self.ca, self.cert, self.key)):
                path = each
                require_file(path)
            path = self.ca
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                path = f"{self.cert} and {self.key}"
                # Without a callback OpenSSL asks whoever sits at the terminal, and waits for him.
                context.load_cert_chain(self.cert, self.key, password=self._refuse_to_ask)
        except (OSError, ssl.SSLError) as error:
            raise RegistryError(f"cannot read {path} for TLS: {error}") from error
        return context

    def _refuse_to_ask(self) -> str:
        raise RegistryError(f"cannot read {self.key} for TLS: it has a passphrase; name a key that has none")


class HttpCalls:
    """The way to the servers of one store."""

    def __init__(self, what: str, endpoints: tuple[tuple[str, int], ...], tls: TlsFiles | None) -> None:
        self._what = what
        self._endpoints = endpoints
        self._tls = tls
        self._index = random.randrange(len(endpoints))  # noqa: S311  # so that not all nodes ask the same server
        self._connection: HTTPConnection | None = None
        self._stream: HTTPResponse | None = None
        self._socket: TimedSocket | None = None
        self._names = Names(fresh_s=_FRESH_S)
        self._is_interrupted = False

    @property
    def server(self) -> str:
        """The server that calls go to now, as messages name it."""
        host, port = self._endpoints[self._index]
        return f"{self._what} at {f'[{host}]' if ':' in host else host}:{port}"

    def call(
        self,
        method: str,
        path: str,
        body: object,
        *,
        until: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask one server; if it has not answered by ``until``, RegistryError is raised, and another one is next.

        ``until`` is by :func:`time.monotonic`.
        """
        return self._answer(self._send(method, path, body, until, headers))

    def open_stream(
        self,
        method: str,
        path: str,
        body: object,
        *,
        until: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | None:
        """Ask for a stream of lines; return what was answered instead of one, if something was."""
        response = self._send(method, path, body, until, headers)
        if response.status == 200:
            self._stream = response
            return None
        return self._answer(response)

    def next_line(self, timeout: float, *, may_end: bool = False) -> dict[str, Any] | None:
        """Wait for the stream's next line; after ``timeout`` silent seconds it is None, and the stream has ended.

        With ``may_end`` an empty one is what is left when the server has ended the stream as it should.
        """
        if self._stream is None or self._socket is None:
            raise RegistryError(f"{self.server}: there is no stream")
        self._socket.wait_for_line(timeout, _REST_OF_LINE_S)
        try:
            line = self._stream.readline(_MAX_BODY)
        except TimeoutError as error:
            if not self._socket.is_silent:
                raise self._lost(error) from error
            self.hang_up()
            return None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: closed by interrupt
            raise self._lost(error) from error
        if not line and may_end and not self._is_interrupted:
            self.hang_up()
            return {}
        if not line:
            raise self._lost(ConnectionError("the stream has ended"))
        return self._json(line)

    def next_server(self) -> None:
        """Hang up, and go to another server next time: this one answers, but can't do what it is for."""
        self.hang_up()
        self._index = (self._index + 1) % len(self._endpoints)

    def hang_up(self) -> None:
        """Close the connection; the next call makes another."""
        connection, self._connection, self._stream = self._connection, None, None
        sock, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if sock is not None:
            sock.close()

    def interrupt(self) -> None:
        """End the call under way and every later one. From any thread."""
        self._is_interrupted = True
        connection = self._socket
        if connection is not None:
            connection.interrupt()

    def _send(
        self, method: str, path: str, body: object, until: float, headers: Mapping[str, str] | None
    ) -> HTTPResponse:
        if self._stream is not None:
            self.hang_up()
        is_fresh = self._connection is None
        try:
            connection = self._connect(until)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            if is_fresh or self._is_interrupted or isinstance(error, TimeoutError):
                raise self._lost(error) from error
            # the server had closed an idle connection: it heard nothing of this call, or nothing of it was answered
            self.hang_up()
            return self._send(method, path, body, until, headers)

    def _connect(self, until: float) -> HTTPConnection:
        if self._is_interrupted:
            raise ConnectionError("this node is closing")
        if self._connection is not None and self._connection.sock is None:
            self.hang_up()  # the server wanted no more than one call
        if self._connection is None:
            host, port = self._endpoints[self._index]
            tls = None if self._tls is None else self._tls.context()
            self._socket = TimedSocket()
            self._socket.until = until
            if self._is_interrupted:  # meanwhile, when there was nothing to shut down
                raise ConnectionError("this node is closing")
            self._socket.connect(self._names, host, port, tls)
            self._connection = (
                HTTPConnection(host, port) if tls is None else HTTPSConnection(host, port, context=tls)
            )
            self._connection.sock = self._socket
        assert self._socket is not None
        self._socket.until = until
        return self._connection

    def _lost(self, error: Exception) -> RegistryError:
        failure = RegistryError(f"{self.server} {_reason(error, self._tls)}")
        self.next_server()
        return failure

    def _answer(self, response: HTTPResponse) -> Answer:
        try:
            data = response.read(_MAX_BODY + 1)
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error
        if response.status == HTTPStatus.TOO_MANY_REQUESTS and _as_json(data) is None:
            # The API server of Kubernetes says this one thing in plain words, and so does many a proxy.
            body: dict[str, Any] = {"message": data[:200].decode(errors="replace").strip()}
        else:
            body = self._json(data)
        wait = response.headers.get("Retry-After", "")
        return Answer(response.status, body, min(float(wait), _MOST_PATIENCE_S) if wait.isdecimal() else 1.0)

    def _json(self, data: bytes) -> dict[str, Any]:
        found = _as_json(data)
        if found is not None:
            return found
        failure = RegistryError(f"{self.server} answers {data[:80]!r}, which is not what {self._what} says")
        self.next_server()
        raise failure


def _as_json(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body, {} of an empty one; None: it has none."""
    if len(data) > _MAX_BODY:
        return None
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _reason(error: Exception, tls: TlsFiles | None) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _why_not_believed(error, tls)
    if isinstance(error, ssl.SSLError):
        return f"does not speak TLS as we do: {error.reason or error}; {_tls_doubt(tls)}"
    if isinstance(error, TimeoutError):
        return "does not answer in time"
    if isinstance(error, socket.gaierror):
        return f"can't be looked up: {error.strerror}"
    if isinstance(error, ConnectionResetError):  # RemoteDisconnected is one
        # Who is greeted in a way that he does not speak may hang up, and what he said before be lost with it.
        other = "does it want TLS? Then begin with etcds://" if tls is None else _tls_doubt(tls)
        return f"breaks off: {error.strerror or error}; {other}"
    if isinstance(error, OSError) and error.strerror:
        return f"can't be reached: {error.strerror}"
    return f"breaks off: {error}" if str(error) else f"breaks off: {type(error).__name__}"


def _why_not_believed(error: ssl.SSLCertVerificationError, tls: TlsFiles | None) -> str:
    if error.verify_code in _OUT_OF_DATE:
        return (
            f"shows a certificate that is out of date by this machine's clock: {error.verify_message}; give the server "
            "a new one, or set the clock right"
        )
    if error.verify_code in _OF_ANOTHER_NAME:
        return (
            f"shows a certificate of another name: {error.verify_message}; name the server as its certificate does, "
            "or give it one with this name"
        )
    trusted = "this machine trusts" if tls is None or tls.ca is None else f"of {tls.ca}"
    return (
        f"shows a certificate that no authority {trusted} vouches for: {error.verify_message}; set the option ca to "
        "the file of its authority"
    )


def _tls_doubt(tls: TlsFiles | None) -> str:
    """Ask what is likely where a server hangs up: it says no more to one whose certificate it does not take."""
    if tls is None or tls.cert is None:
        return "is it plain HTTP, or is a cert missing?"
    return f"is it plain HTTP, or does it not take {tls.cert}, which may have expired or be of another authority?"
