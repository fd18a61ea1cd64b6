"""An API server of Kubernetes as far as Lease objects go: the real paths, versions, watches, bookmarks and refusals.

Made after the API conventions: a list has a version and comes in pages; a watch from a version tells what came after,
ends after ``timeoutSeconds`` and is refused with 410 when that is forgotten; writes name the version that they replace.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

GROUP = "/apis/coordination.k8s.io/v1/namespaces"
_HOURS = 3600.0


class FakeKubernetes:
    """One namespace of leases. ``tokens`` maps each token to the verbs that its account has."""

    def __init__(self, cert: Path, key: Path, namespace: str = "serving") -> None:
        self.namespace = namespace
        self.tokens: dict[str, set[str]] = {
            "good": {"get", "list", "watch", "create", "update", "delete"},
            "reader": {"get", "list", "watch"},
        }
        self.objects: dict[str, dict[str, Any]] = {}
        self.throttled = 0
        """So many of the next requests are refused with 429."""
        self.watch_s = _HOURS
        """After so long a watch is ended, whatever its reader asked for."""
        self.page = 500
        """Objects of one page at most."""
        self.requests: list[tuple[str, str]] = []
        """Verb and path of each."""
        self._version = 100
        self._forgotten = 0
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = threading.Condition()  # guards all above
        self._is_closing = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are two writes

            def handle_one(self) -> None:
                fake.serve(self)

            do_GET = do_POST = do_PUT = do_DELETE = handle_one  # noqa: N815 - the base class's names

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def compact(self) -> None:
        """Forget all history."""
        with self._changed:
            self._forgotten, self._history = self._version, []

    def tick(self, n: int = 1) -> None:
        """Let other objects of the cluster change, as they do all the time."""
        with self._changed:
            self._version += n
            self._changed.notify_all()

    def end_watches(self) -> None:
        """End every watch, as a server does after a while."""
        with self._changed:
            before, self.watch_s = self.watch_s, 0.0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._n_watches == 0, 10.0)
            self.watch_s = before

    _n_watches = 0

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, unless the server is closed: connections that were kept outlive it."""
        if self._is_closing:
            request.close_connection = True
            return
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else {}
        parts = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        verb = {"POST": "create", "PUT": "update", "DELETE": "delete"}.get(request.command, "get")
        leases = f"{GROUP}/{self.namespace}/leases"
        name = parts.path.removeprefix(leases).lstrip("/")
        if verb == "get" and not name:
            verb = "watch" if query.get("watch") == "1" else "list"
        with self._changed:
            self.requests.append((verb, request.path))
            refusal = self._refusal(request, parts.path.startswith(leases), verb)
            if refusal is None and verb != "watch":
                refusal = getattr(self, f"_{verb}")(name, body, query)
        if refusal is not None:
            self._answer(request, *refusal)
        else:
            self._watch(request, query)

    def _refusal(
        self, request: BaseHTTPRequestHandler, is_here: bool, verb: str
    ) -> tuple[int, dict[str, Any]] | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.throttled > 0:
            self.throttled -= 1
            return _status(429, "TooManyRequests", "Too many requests, please try again later.")
        if token not in self.tokens:
            return _status(401, "Unauthorized", "Unauthorized")
        if not is_here:
            return _status(404, "NotFound", "the server could not find the requested resource")
        if verb not in self.tokens[token]:
            what = f'leases.coordination.k8s.io is forbidden: User "{token}" cannot {verb} resource "leases"'
            return _status(403, "Forbidden", what)
        return None

    def _list(self, name: str, body: dict[str, Any], query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        chosen = sorted(n for n, found in self.objects.items() if _matches(found, query))
        start, limit = int(query.get("continue", 0)), min(int(query.get("limit", 500)), self.page)
        metadata: dict[str, Any] = {"resourceVersion": str(self._version)}
        if start + limit < len(chosen):
            metadata["continue"] = str(start + limit)
        items = [self.objects[n] for n in chosen[start : start + limit]]
        return 200, {"kind": "LeaseList", "metadata": metadata, "items": items}

    def _get(self, name: str, body: dict[str, Any], query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        return (200, self.objects[name]) if name in self.objects else _missing(name)

    def _create(self, name: str, body: dict[str, Any], query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        name = body["metadata"]["name"]
        if name in self.objects:
            return _status(409, "AlreadyExists", f'leases.coordination.k8s.io "{name}" already exists')
        return 201, self._write("ADDED", name, body)

    def _update(self, name: str, body: dict[str, Any], query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        uid, there = body["metadata"].get("uid"), self.objects.get(name)
        if uid is not None and uid != (there["metadata"]["uid"] if there else ""):
            return _status(409, "Conflict", f"Precondition failed: UID in precondition: {uid}")
        if there is None:  # it makes a Lease then, whatever version the writer names
            return 201, self._write("ADDED", name, body)
        if body["metadata"]["resourceVersion"] != self.objects[name]["metadata"]["resourceVersion"]:
            return _status(409, "Conflict", "the object has been modified; please apply your changes to it")
        return 200, self._write("MODIFIED", name, body)

    def _delete(self, name: str, body: dict[str, Any], query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if name not in self.objects:
            return _missing(name)
        wanted = body.get("preconditions", {}).get("resourceVersion")
        if wanted not in (None, self.objects[name]["metadata"]["resourceVersion"]):
            return _status(409, "Conflict", "the ResourceVersion in the precondition is another")
        self._write("DELETED", name, self.objects[name])
        del self.objects[name]
        return 200, {"kind": "Status", "status": "Success"}

    def _write(self, kind: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        made = json.loads(json.dumps(body))
        made["metadata"]["resourceVersion"] = str(self._version)
        made["metadata"]["uid"] = (
            self.objects[name]["metadata"]["uid"] if name in self.objects else f"uid-{self._version}"
        )
        self.objects[name] = made
        self._history.append((self._version, kind, made))
        self._changed.notify_all()
        return made

    def _watch(self, request: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        with self._changed:
            self._n_watches += 1
        try:
            request.send_response(200)
            request.send_header("Content-Type", "application/json")
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            for event in self._events(query):
                line = json.dumps(event).encode() + b"\n"
                request.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                request.wfile.flush()
            request.wfile.write(b"0\r\n\r\n")
        except OSError:
            request.close_connection = True
        finally:
            with self._changed:
                self._n_watches -= 1
                self._changed.notify_all()

    def _events(self, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        since, began = int(query["resourceVersion"]), time.monotonic()
        while True:
            with self._changed:
                if since < self._forgotten:
                    _, gone = _status(410, "Expired", f"too old resource version: {since} ({self._version})")
                    yield {"type": "ERROR", "object": gone}
                    return
                news = [event for event in self._history if event[0] > since and _matches(event[2], query)]
                version = self._version
                if not news and version == since:
                    left = began + min(self.watch_s, float(query["timeoutSeconds"])) - time.monotonic()
                    if left <= 0 or self._is_closing:
                        return
                    self._changed.wait(min(left, 0.2))
                    continue
            yield from ({"type": kind, "object": found} for _, kind, found in news)
            since = version
            if query.get("allowWatchBookmarks") == "true":
                yield {
                    "type": "BOOKMARK",
                    "object": {"kind": "Lease", "metadata": {"resourceVersion": str(version)}},
                }

    @staticmethod
    def _answer(request: BaseHTTPRequestHandler, code: int, body: dict[str, Any]) -> None:
        # the real one says that it has too much to do in plain words, before anything that speaks JSON is reached
        data = f"{body['message']}\n".encode() if code == 429 else json.dumps(body).encode()
        request.send_response(code)
        if code == 429:
            request.send_header("Retry-After", "1")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


def _matches(found: dict[str, Any], query: dict[str, str]) -> bool:
    name, _, value = query.get("labelSelector", "").partition("=")
    return not name or found["metadata"].get("labels", {}).get(name) == value


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}


def _missing(name: str) -> tuple[int, dict[str, Any]]:
    code, status = _status(404, "NotFound", f'leases.coordination.k8s.io "{name}" not found')
    return code, {**status, "details": {"name": name, "group": "coordination.k8s.io", "kind": "leases"}}
