"""What the metrics port serves besides metrics: the page, and what it asks for.

Everything is read only. Who comes from elsewhere needs a token, since the page shows namespaces, node ids and who has
which page; and a name that leads to this host is no way around that: on loopback only loopback's own names are taken
for hosts, or a page on the web whose name suddenly means 127.0.0.1 could read along.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from urllib.parse import parse_qs

from p2pkv.address import is_loopback
from p2pkv.errors import ClosedError, UsageError
from p2pkv.explain.asking import question_about
from p2pkv.explain.explanation import Explanation
from p2pkv.explain.messages import Question
from p2pkv.explain.sentences import lines, record
from p2pkv.metrics_server import Page

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/blocks.js": ("blocks.js", "text/javascript"),
}
_EXPLAIN_S = 2.0
_COOKIE = "p2pkv_token"
ALONE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of the page: it asks nobody but who serves it, and stands in nobody else's."""
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}


class Site:
    """Thread-safe. ``host`` is where the port is bound; ``token`` is empty if there is none."""

    def __init__(
        self,
        host: str,
        token: str,
        read_cluster: Callable[[], Mapping[str, object]],
        explain: Callable[[Question, float], Explanation],
    ) -> None:
        self._token = token
        self._is_local = is_loopback(host)
        self._hosts = _LOOPBACK_NAMES | {f"[{host}]" if ":" in host else host}
        self._read_cluster = read_cluster
        self._explain = explain

    def answer(self, environ: Mapping[str, object]) -> Page | None:
        """Answer a WSGI request; None for a path that is not the site's."""
        path = str(environ.get("PATH_INFO", ""))
        if path not in (*_FILES, "/cluster.json", "/explain.json"):
            return None
        query = parse_qs(str(environ.get("QUERY_STRING", "")), keep_blank_values=True)
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            return _text("405 Method Not Allowed", "this is only read")
        refusal = self._refusal(environ, query)
        if refusal is not None:
            return _text("403 Forbidden", refusal)
        if path == "/" and self._token and "token" in query:
            cookie = f"{_COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            headers = {**ALONE, "Location": "/", "Set-Cookie": cookie}
            return Page("303 See Other", "text/plain", b"", headers)
        return self._page(path, query)

    def _page(self, path: str, query: Mapping[str, list[str]]) -> Page:
        if path in _FILES:
            name, kind = _FILES[path]
            return Page("200 OK", kind, files("p2pkv.dashboard").joinpath(name).read_bytes(), ALONE)
        try:
            if path == "/cluster.json":
                return _json(self._read_cluster())
            explained = self._explain(_question(query), _EXPLAIN_S)
        except UsageError as error:
            return _text("400 Bad Request", str(error))
        except ClosedError as error:
            return _text("503 Service Unavailable", str(error))
        return _json({**record(explained), "lines": list(lines(explained))})

    def _refusal(self, environ: Mapping[str, object], query: Mapping[str, list[str]]) -> str | None:
        """Say why who asks is told nothing, if so."""
        if self._token:
            given = [*query.get("token", ()), *_bearer(environ), *_cookie(environ)]
            if any(hmac.compare_digest(text.encode(), self._token.encode()) for text in given):
                return None
            return "this page needs the token of dashboard_token: open /?token=... once, or send it as a bearer token"
        if not self._is_local:
            return (
                "this page is shown off loopback only to who has a token; set dashboard_token, or metrics_host to "
                "127.0.0.1"
            )
        host = str(environ.get("HTTP_HOST", ""))
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        return (
            None
            if name in self._hosts
            else f"no host of that name is served here; open http://{min(self._hosts)}"
        )


def _question(query: Mapping[str, list[str]]) -> Question:
    key, page_id = query.get("key", [None])[0], query.get("id", [None])[0]
    try:
        known = None if page_id is None else bytes.fromhex(page_id)
    except ValueError:
        raise UsageError(f"an id is 32 hexadecimal digits, not {page_id!r}") from None
    return question_about(key, known, query.get("namespace", [None])[0])


def _bearer(environ: Mapping[str, object]) -> list[str]:
    kind, _, token = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
    return [token.strip()] if kind.lower() == "bearer" else []


def _cookie(environ: Mapping[str, object]) -> list[str]:
    try:
        cookie = SimpleCookie(str(environ.get("HTTP_COOKIE", "")))
    except CookieError:
        return []
    return [cookie[_COOKIE].value] if _COOKIE in cookie else []


def _json(value: object) -> Page:
    return Page("200 OK", "application/json", json.dumps(value).encode(), ALONE)


def _text(status: str, text: str) -> Page:
    return Page(status, "text/plain", f"{text}\n".encode(), ALONE)
