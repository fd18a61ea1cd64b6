"""Records in etcd, over the JSON gateway that each of its servers has on its client port (``/v3/...``).

Nothing has to be installed for it. A record is a key under ``PREFIX/CLUSTER/members/`` that goes with a lease; a write
is a transaction that compares the version (etcd's ``mod_revision``), so that of two nodes of one id one sees the other.
A watch asks for a server that has a leader, and ends when it has none.
"""

from __future__ import annotations

import base64
import math
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote

from p2pkv.directory.registry.files import text_of
from p2pkv.directory.registry.http_calls import Answer, HttpCalls, TlsFiles
from p2pkv.directory.registry.store import Change, Contents, Entry, GapError, Store, understood
from p2pkv.errors import RegistryError
from p2pkv.store_url import StoreUrl

_NOT_FOUND = 5
_FAILED_PRECONDITION = 9
_NO_USERS = "authentication is not enabled"
_UNAUTHENTICATED = 16
_PERMISSION_DENIED = 7
_UNAVAILABLE = 14
_OWN_CONNECTION = ("connection", "transport")
"""What etcd's gateway speaks of when it can't reach its own server."""
_LEADER = {"Grpc-Metadata-hasleader": "true"}


class _LeaseGoneError(RegistryError):
    """A lease has ended, of which nothing was known here."""


class EtcdStore(Store):
    """One thread's way to an etcd of version 3.4 or newer."""

    def __init__(self, url: StoreUrl, cluster: str) -> None:
        self._url = url
        self._prefix = f"{url.prefix.rstrip('/')}/{quote(cluster, safe='')}/members/".encode()
        tls = TlsFiles(url.ca, url.cert, url.key) if url.is_tls else None
        self._calls = HttpCalls("etcd", url.endpoints, tls)
        self._token = ""
        self._lease: str | None = None

    @property
    def server(self) -> str:
        return self._calls.server

    @understood
    def read_all(self, timeout: float) -> Contents:
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        request = {"key": _text(self._prefix), "range_end": _text(end)}
        body = self._ask("kv/range", request, time.monotonic() + timeout)
        entries = {name: _entry(kv) for kv in body.get("kvs", ()) if (name := self._name(kv)) is not None}
        return Contents(entries, _number(body["header"], "revision"))

    @understood
    def watch(self, since: int, timeout: float) -> None:
        until = time.monotonic() + timeout
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        request = {
            "create_request": {
                "key": _text(self._prefix),
                "range_end": _text(end),
                "start_revision": str(since + 1),
            }
        }
        refusal = self._calls.open_stream(
            "POST", "/v3/watch", request, until=until, headers={**self._headers(), **_LEADER}
        )
        if refusal is not None:
            raise self._refused(refusal)
        created = self._line(max(0.0, until - time.monotonic()))
        if created is None:
            server = self._calls.server
            self._calls.next_server()
            raise RegistryError(f"{server} does not say that it watches")
        self._check(created)

    @understood
    def changes(self, timeout: float) -> list[Change] | None:
        result = self._line(timeout)
        if result is None:
            return None
        self._check(result)
        return [
            Change(
                name,
                None if event.get("type") == "DELETE" else _bytes(event["kv"].get("value", "")),
                _number(event["kv"], "mod_revision"),
            )
            for event in result.get("events", ())
            if (name := self._name(event["kv"])) is not None
        ]

    @understood
    def put(self, name: str, value: bytes, expected: int, timeout: float) -> Entry | int:
        until = time.monotonic() + timeout
        key = _text(self._prefix + quote(name, safe="").encode())
        # The lease is renewed first: where nothing may be written, as with the alarm NOSPACE, what is there stays.
        if self._lease is None or not self._keeps_lease(until):
            granted = self._ask("lease/grant", {"TTL": str(self._url.ttl)}, until)
            self._lease = str(granted["ID"])
        request = {
            "compare": [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}],
            "success": [{"request_put": {"key": key, "value": _text(value), "lease": self._lease}}],
            "failure": [{"request_range": {"key": key}}],
        }
        try:
            body = self._ask("kv/txn", request, until)
        except _LeaseGoneError:
            self._lease = None  # the next attempt has a new one
            raise
        if body.get("succeeded"):
            return _number(body["header"], "revision")
        there = body["responses"][0]["response_range"].get("kvs", ())
        # it is gone meanwhile, so that the next attempt expects none
        return _entry(there[0]) if there else Entry(value, 0)

    @understood
    def renew(self, name: str, version: int, timeout: float) -> int | None:
        until = time.monotonic() + timeout
        key = _text(self._prefix + quote(name, safe="").encode())
        if not self._keeps_lease(until):
            return None
        body = self._ask("kv/range", {"key": key, "keys_only": True}, until)
        found = body.get("kvs", ())
        return version if found and _number(found[0], "mod_revision") == version else None

    @understood
    def remove(self, name: str, timeout: float) -> None:
        if self._lease is not None:
            with suppress(_LeaseGoneError):
                self._ask("lease/revoke", {"ID": self._lease}, time.monotonic() + timeout)
            self._lease = None

    def leave_server(self) -> None:
        self._calls.next_server()

    def interrupt(self) -> None:
        self._calls.interrupt()

    def close(self) -> None:
        self._calls.hang_up()

    # asking

    def _ask(self, path: str, request: dict[str, Any], until: float) -> dict[str, Any]:
        """Ask one server, with a new token if the old one counts no more."""
        for is_last in (False, True):
            answer = self._calls.call(
                "POST", f"/v3/{path}", request, until=until, headers=self._headers(until)
            )
            if answer.status == 200 and "error" not in answer.body:
                return answer.body
            is_old = self._token and answer.body.get("code") == _UNAUTHENTICATED
            self._token = ""
            if not is_old or is_last:
                raise self._refused(answer)
        raise AssertionError("the last attempt has returned or raised")

    def _keeps_lease(self, until: float) -> bool:
        """Renew the lease; False, and there is none, if it has ended."""
        lease = self._ask("lease/keepalive", {"ID": self._lease}, until).get("result", {})
        if not _number(lease, "TTL"):
            self._lease = None
        return self._lease is not None

    def _headers(self, until: float = math.nan) -> dict[str, str]:
        """Return what proves who we are; ask for it, before ``until``, where nothing is known."""
        url = self._url
        if url.user is None:
            return {}
        if not self._token and not math.isnan(until):
            assert url.password_file is not None
            request = {"name": url.user, "password": _password(url.password_file)}
            answer = self._calls.call("POST", "/v3/auth/authenticate", request, until=until)
            if answer.body.get("code") == _FAILED_PRECONDITION and _NO_USERS in str(
                answer.body.get("message")
            ):
                return {}  # asked again at each call: from when on it wants users is not said
            if answer.status != 200 or "token" not in answer.body:
                raise self._refused(answer)
            self._token = str(answer.body["token"])
        return {"Authorization": self._token} if self._token else {}

    def _line(self, timeout: float) -> dict[str, Any] | None:
        line = self._calls.next_line(timeout)
        if line is None:
            return None
        if "result" not in line:
            raise self._refused(Answer(200, line.get("error", line)))
        found: dict[str, Any] = line["result"]
        return found

    def _check(self, result: dict[str, Any]) -> None:
        """Raise if a watch says that it has ended."""
        if not result.get("canceled"):
            return
        compacted, reason = _number(result, "compact_revision"), result.get("cancel_reason", "")
        server = self._calls.server
        self._calls.hang_up()
        if compacted:
            raise GapError(f"{server} has forgotten what came before revision {compacted}")
        self._token = ""  # expired, perhaps
        self._calls.next_server()
        raise RegistryError(f"{server} has ended the watch{f': {reason}' if reason else ''}")

    def _refused(self, answer: Answer) -> RegistryError:
        """Return what a refusal means; after one that may be this server's alone the next is asked."""
        server, code = self._calls.server, answer.body.get("code", answer.body.get("grpc_code"))
        said = answer.body.get("message") or answer.body.get("error") or f"HTTP status {answer.status}"
        # Any gateway to gRPC says of a path that it does not know that this is not found.
        if code == _NOT_FOUND and "lease" in str(said):
            return _LeaseGoneError(f"{server} knows nothing of the lease any more: {said}")
        self._calls.next_server()
        if answer.status == 404:
            return RegistryError(
                f"{server} answers, but not as etcd 3.4 or newer does (no /v3/): is it another service, or one that "
                "runs with --enable-grpc-gateway=false?"
            )
        user = f"user {self._url.user!r}" if self._url.user is not None else "whoever gives no user"
        if (
            code == _UNAUTHENTICATED
            or "authentication failed" in str(said)
            or "user name is empty" in str(said)
        ):
            return RegistryError(
                f"{server} refuses {user}: {said}; set the options user and password_file right"
            )
        if code == _PERMISSION_DENIED:
            advice = (
                "set the options user and password_file"
                if self._url.user is None
                else "grant one of its roles readwrite there, with --prefix"
            )
            return RegistryError(f"{server} does not let {user} at {self._prefix.decode()}: {said}; {advice}")
        why = ""
        if self._url.cert and code == _UNAVAILABLE and any(word in str(said) for word in _OWN_CONNECTION):
            # the gateway is a client of its own server, with the server's certificate
            why = "; with --client-cert-auth its own certificate needs the usage clientAuth too"
        return RegistryError(f"{server} can't do it: {said}{why}")

    def _name(self, kv: dict[str, Any]) -> str | None:
        """Return the node id of a key; None for a key that no node has, though it may read as another's."""
        written = _bytes(kv["key"])[len(self._prefix) :].decode(errors="replace")
        name = unquote(written)
        return name if quote(name, safe="") == written else None


def _password(path: str) -> str:
    try:
        return text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(f"cannot read password_file {path}: {error}") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _number(found: dict[str, Any], field: str) -> int:
    """Return a 64-bit number, which JSON has as a text; etcd leaves zeros out."""
    return int(found.get(field, 0))


def _entry(kv: dict[str, Any]) -> Entry:
    return Entry(_bytes(kv.get("value", "")), _number(kv, "mod_revision"))
