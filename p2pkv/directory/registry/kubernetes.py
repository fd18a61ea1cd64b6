"""Records in Kubernetes: Lease objects of one namespace, through the API server, by the pod's service account.

A Lease is named after a hash of cluster and node id, has a label of the cluster by which it is listed, and two
annotations: the node id and the sealed record. A record's version is the object's ``resourceVersion``, so that a write
over another's is refused. A watch that the server ends is taken up again where it was, which bookmarks keep near; only
one that the server can't take up any more (410 Gone) leads to a list.

Kubernetes removes no Lease by itself. One that was not renewed for several times its duration is taken for gone by who
lists, and deleted; whoever lives puts it there again.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from hashlib import blake2b
from typing import Any
from urllib.parse import urlencode

from p2pkv.directory.registry.files import text_of
from p2pkv.directory.registry.http_calls import Answer, HttpCalls, TlsFiles
from p2pkv.directory.registry.store import Change, Contents, Entry, GapError, Store, understood
from p2pkv.errors import RegistryError
from p2pkv.store_url import StoreUrl

_NODE_ID = "p2pkv.io/node-id"
_RECORD = "p2pkv.io/record"
_CLUSTER = "p2pkv.io/cluster"
_PAGE = 500
"""Objects in one answer, as kubectl asks for them."""
_WATCH_S = 300
"""After so long the server ends a watch, and another server may go on with it."""
_SHORT_S = 1.0
_MOST_SHORT = 3
"""A watch that ends this soon has failed, unless it brought something; so have more in a row, whatever they brought."""
_AGAIN_S = 2.0
"""What taking a watch up again may take, which is a call like any other."""
_FORGOTTEN = 3
"""So many durations without a renewal, by clocks that may be apart, and a Lease is nobody's."""
_MOST_LOST = 3
"""Writes of ours whose answers were lost, and which may still be done while the record is taken away."""
_NO_UID = "none"
"""No object has it. A PUT of a Lease makes one where none is, whatever version it names; but not if it names a uid."""
_MOST_SWEPT = 8
"""Of those that one list deletes: others list too."""
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"


class KubernetesStore(Store):
    """One thread's way to the API server."""

    def __init__(self, url: StoreUrl, cluster: str) -> None:
        self._url = url
        self._cluster = cluster
        self._label = _hash(cluster)
        self._calls = HttpCalls("kubernetes", url.endpoints, TlsFiles(url.ca))
        self._path = ""
        self._since = 0
        self._watched_at = 0.0
        self._has_brought = False  # whether this watch has brought anything
        self._n_short = 0  # watches in a row that ended at once
        self._own: int | None = None
        self._uids: dict[str, str] = {}  # of the objects that were seen here, by their names
        self._perhaps: set[bytes] = set()  # what may be there: sent, and not said to be refused
        self._not_before = 0.0  # a server that is throttled says when to come again

    @property
    def server(self) -> str:
        return self._calls.server

    @understood
    def read_all(self, timeout: float) -> Contents:
        until = time.monotonic() + timeout
        entries: dict[str, Entry] = {}
        forgotten: list[dict[str, Any]] = []
        version, token, seen = 0, "", {""}
        while True:
            query = {"labelSelector": f"{_CLUSTER}={self._label}", "limit": _PAGE}
            page = self._ask("GET", self._leases(query | ({"continue": token} if token else {})), until)
            for lease in page.get("items", ()):
                if self._is_forgotten(lease):
                    forgotten.append(lease)
                else:
                    entries[self._name(lease)] = _entry(lease)
            version = int(page["metadata"]["resourceVersion"])
            token = page["metadata"].get("continue", "")
            if not token:
                break
            if token in seen:  # it would go round in circles
                server = self._calls.server
                self._calls.next_server()
                raise RegistryError(f"{server} gives a page of its list twice, and no end of it")
            seen.add(token)
        with suppress(RegistryError):  # who may only read leaves that to others
            for lease in forgotten[:_MOST_SWEPT]:
                self._delete(lease["metadata"]["name"], lease["metadata"]["resourceVersion"], until)
        return Contents(entries, version)

    @understood
    def watch(self, since: int, timeout: float) -> None:
        self._since, self._watched_at, self._has_brought = since, time.monotonic(), False
        query = {
            "labelSelector": f"{_CLUSTER}={self._label}",
            "watch": 1,
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": _WATCH_S,
        }
        self._wait_if_asked_to()
        refusal = self._calls.open_stream(
            "GET", self._leases(query), None, until=time.monotonic() + timeout, headers=self._headers()
        )
        if refusal is not None:
            raise self._refused(refusal)

    @understood
    def changes(self, timeout: float) -> list[Change] | None:
        event = self._calls.next_line(timeout, may_end=True)
        if event is None:
            return None
        if not event:  # the server has ended it, as it does after a while
            self._check_end()
            self.watch(self._since, min(timeout, _AGAIN_S))
            return []
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            self._calls.hang_up()
            raise self._refused(Answer(int(found.get("code", 500)), found))
        self._since, self._has_brought = int(found["metadata"]["resourceVersion"]), True
        if kind == "BOOKMARK":
            return []
        entry = _entry(found)
        value = None if kind == "DELETED" else entry.value
        return [Change(self._name(found), value, entry.version)]

    @understood
    def put(self, name: str, value: bytes, expected: int, timeout: float) -> Entry | int:
        return self._put(name, value, expected, time.monotonic() + timeout)

    def _put(self, name: str, value: bytes, expected: int, until: float) -> Entry | int:
        self._perhaps.add(value)
        object_name = self._object_name(name)
        while True:
            uid = self._uids.get(object_name, "")
            if expected == 0:
                answer = self._call("POST", self._leases(), self._lease(name, value), until)
            else:
                path, lease = self._leases(of=object_name), self._lease(name, value)
                lease["metadata"] |= {"resourceVersion": str(expected), "uid": uid or _NO_UID}
                answer = self._call("PUT", path, lease, until)
            if answer.status in (200, 201):
                self._note_uid(answer)
                self._own, self._perhaps = int(answer.body["metadata"]["resourceVersion"]), {value}
                return self._own
            if answer.status not in (404, 409) or self._is_elsewhere(answer):
                raise self._refused(answer)
            there = self._call("GET", self._leases(of=object_name), None, until)
            if there.status == 404:  # it is gone meanwhile, so that the next attempt expects none
                return Entry(value, 0)
            if there.status != 200:
                raise self._refused(there)
            self._note_uid(there)
            entry = _entry(there.body)
            if entry.version != expected or self._uids[object_name] == uid:
                return entry

    @understood
    def renew(self, name: str, version: int, timeout: float) -> int | None:
        until = time.monotonic() + timeout
        there = self._call("GET", self._leases(of=self._object_name(name)), None, until)
        if there.status not in (200, 404):
            raise self._refused(there)
        if there.status == 200:
            self._note_uid(there)
        if there.status == 404 or int(there.body["metadata"]["resourceVersion"]) != version:
            return None
        value = _entry(there.body).value
        result = self._put(name, value, version, until)
        return result if isinstance(result, int) else None

    @understood
    def remove(self, name: str, timeout: float) -> None:
        self._take_away(self._object_name(name), time.monotonic() + timeout)
        self._own, self._perhaps = None, set()

    def _take_away(self, object_name: str, until: float) -> None:
        if self._own is not None and self._delete(object_name, str(self._own), until):
            return
        # it has another version where the answer to a write of ours was lost
        for _ in range(_MOST_LOST if self._perhaps else 0):
            there = self._call("GET", self._leases(of=object_name), None, until)
            if there.status == 404:
                return
            if there.status != 200:
                raise self._refused(there)
            entry = _entry(there.body)
            if entry.value not in self._perhaps or self._delete(object_name, str(entry.version), until):
                return

    def leave_server(self) -> None:
        self._calls.next_server()

    def interrupt(self) -> None:
        self._calls.interrupt()

    def close(self) -> None:
        self._calls.hang_up()

    # asking

    def _check_end(self) -> None:
        """Raise if a watch has ended so soon that the next would as well: they would be asked for without a pause."""
        is_short = time.monotonic() - self._watched_at < _SHORT_S
        self._n_short = self._n_short + 1 if is_short else 0
        if self._n_short > _MOST_SHORT or (is_short and not self._has_brought):
            server = self._calls.server
            self._calls.next_server()
            raise RegistryError(f"{server} ends a watch as soon as it has begun; is a proxy before it?")

    def _delete(self, object_name: str, version: str, until: float) -> bool:
        """Delete an object, unless its version is another by now; whether it is gone."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"resourceVersion": version},
        }
        answer = self._call("DELETE", self._leases(of=object_name), options, until)
        if answer.status not in (200, 202, 404, 409):
            raise self._refused(answer)
        return answer.status != 409

    def _ask(self, method: str, path: str, until: float) -> dict[str, Any]:
        answer = self._call(method, path, None, until)
        if answer.status != 200:
            raise self._refused(answer)
        return answer.body

    def _call(self, method: str, path: str, body: object, until: float) -> Answer:
        self._wait_if_asked_to()
        return self._calls.call(method, path, body, until=until, headers=self._headers())

    def _wait_if_asked_to(self) -> None:
        left = self._not_before - time.monotonic()
        if left > 0:
            raise RegistryError(f"{self._calls.server} has too much to do, and wants {left:.1f} s more")

    def _headers(self) -> dict[str, str]:
        """Return what proves who we are; the file is renewed by the kubelet, so it is read each time."""
        token = _text_of("token_file", self._url.token_file)
        if not token.isascii() or not token.isprintable():
            # No header takes it, and the error that says so repeats it, which is logged.
            raise RegistryError(
                f"token_file {self._url.token_file} holds no token: one is a line of ASCII that can be printed"
            )
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def _leases(self, query: Mapping[str, object] | None = None, *, of: str = "") -> str:
        if not self._path:
            namespace = self._url.namespace or _text_of("namespace", self._url.namespace_file)
            self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        return self._path + (f"/{of}" if of else "") + (f"?{urlencode(query)}" if query else "")

    def _refused(self, answer: Answer) -> RegistryError:
        """Return what a refusal means; after one that may be this server's alone the next is asked."""
        server, said = self._calls.server, answer.body.get("message") or f"HTTP status {answer.status}"
        if answer.status == 410:
            return GapError(f"{server} has forgotten what came before: {said}")
        if answer.status == 429:
            self._not_before = time.monotonic() + answer.retry_after
            return RegistryError(f"{server} has too much to do: {said}")
        self._calls.next_server()
        if answer.status == 401:
            return RegistryError(
                f"{server} does not know the token of {self._url.token_file}: {said}; is it this cluster's, and "
                "renewed?"
            )
        if answer.status == 403:
            return RegistryError(
                f"{server} does not let this service account: {said}; its role needs get, list, watch, create, update "
                "and delete on leases of coordination.k8s.io"
            )
        if answer.status == 404:
            return RegistryError(
                f"{server} has no leases in {self._path}: {said}; is the namespace right, and is it Kubernetes?"
            )
        return RegistryError(f"{server} can't do it: {said}")

    @staticmethod
    def _is_elsewhere(answer: Answer) -> bool:
        """Whether nothing was found because the namespace, or the API, is not there."""
        return answer.status == 404 and answer.body.get("details", {}).get("kind") != "leases"

    # the objects

    def _object_name(self, name: str) -> str:
        return f"p2pkv-{_hash(f'{self._cluster}/{name}')}"

    def _note_uid(self, answer: Answer) -> None:
        metadata = answer.body["metadata"]
        self._uids[str(metadata["name"])] = str(metadata.get("uid", ""))

    def _lease(self, name: str, value: bytes) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self._object_name(name),
            "labels": {_CLUSTER: self._label, "app.kubernetes.io/managed-by": "p2pkv"},
            "annotations": {_NODE_ID: name, _RECORD: base64.b64encode(value).decode()},
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": name,
                "leaseDurationSeconds": self._url.ttl,
                "renewTime": datetime.now(timezone.utc).strftime(_TIME),
            },
        }

    def _name(self, lease: dict[str, Any]) -> str:
        """Return the node id that an object is of; one that is not named after it has a name that no node has."""
        metadata = lease["metadata"]
        name = (metadata.get("annotations") or {}).get(_NODE_ID, "")
        return str(name) if self._object_name(name) == metadata["name"] else f"Lease\t{metadata['name']}"

    def _is_forgotten(self, lease: dict[str, Any]) -> bool:
        try:
            renewed = datetime.strptime(lease["spec"]["renewTime"], _TIME).replace(tzinfo=timezone.utc)
            life = int(lease["spec"]["leaseDurationSeconds"])
        except (KeyError, TypeError, ValueError):
            return False  # it is none of ours: its record will not be readable either
        return (datetime.now(timezone.utc) - renewed).total_seconds() > _FORGOTTEN * life


def _entry(lease: dict[str, Any]) -> Entry:
    metadata = lease["metadata"]
    try:
        record = base64.b64decode((metadata.get("annotations") or {}).get(_RECORD, ""))
    except ValueError:
        record = b""  # whoever opens the record says that it is none
    return Entry(record, int(metadata["resourceVersion"]))


def _hash(text: str) -> str:
    """Return 32 characters that may stand in names and labels, whatever the text."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _text_of(what: str, path: str | None) -> str:
    assert path is not None, f"{what} is always known for Kubernetes"
    try:
        return text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RegistryError(
            f"cannot read {what} {path}: {error}; is this a pod with a service account? Else set the option {what}"
        ) from error
