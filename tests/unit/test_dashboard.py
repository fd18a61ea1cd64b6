"""The page at ``/``: who may see it, and that a browser shows in it what the nodes count."""

from __future__ import annotations

import html
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from browsers import CHROMIUM, MISSING, browse
from p2pkv import Config, ConfigError, Node
from p2pkv.dashboard.site import Site
from pair import Pair

TOKEN = "a-token-of-a-test.0123"
FOLDER = Path(__file__).parents[2] / "p2pkv/dashboard"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, metrics_port=0)
    yield pair
    pair.close()


def _get(node: Node, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    port = node.metrics_port
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as page:  # noqa: S310
            return page.status, page.read().decode(), dict(page.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def test_the_page_and_all_it_asks_for_come_from_the_node(pair: Pair) -> None:
    status, text, headers = _get(pair.reader, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    named = re.findall(r'(?:src|href)="([^"#]+)"', text)
    assert {"page.css", "page.js", "charts.js", "blocks.js"} <= set(named)
    for name in named:
        assert name == "data:," or _get(pair.reader, f"/{name}")[0] == 200, name
    for path in FOLDER.glob("*.*"):
        outside = set(re.findall(r"https?://[\w.]+", path.read_text())) if path.suffix != ".py" else set()
        assert outside <= {"http://www.w3.org"}, "SVG's name, which nobody fetches, is all there may be"


def test_the_cluster_is_told_as_every_node_counts_it(pair: Pair) -> None:
    keys = pair.publish()
    assert pair.reader.fetch(keys, pair.destination).all()
    told = json.loads(_get(pair.reader, "/cluster.json")[1])
    assert [(m["node_id"], m["state"]) for m in told["members"]] == [("owner", "ALIVE"), ("reader", "ALIVE")]
    assert told["counters"]["owner"]["p2pkv_published_pages_total"] == len(keys)
    fetched = 'p2pkv_fetched_pages_total{source="shm"}'
    assert told["counters"]["reader"][fetched] == len(keys)


def test_many_who_look_cost_the_members_one_question_a_second(pair: Pair) -> None:
    asked = "p2pkv_control_requests_total"
    first = json.loads(_get(pair.reader, "/cluster.json")[1])
    again = json.loads(_get(pair.reader, "/cluster.json")[1])
    assert first["counters"]["owner"][asked] == again["counters"]["owner"][asked]


def test_a_page_is_explained(pair: Pair) -> None:
    keys = pair.publish()
    told = json.loads(_get(pair.reader, f"/explain.json?key={keys[0]}")[1])
    assert (told["verdict"], told["places"][0]["node_id"]) == ("in_pool", "owner")
    assert "owner has it in its pool" in "\n".join(told["lines"])
    assert json.loads(_get(pair.reader, f"/explain.json?id={told['page_id']}")[1])["verdict"] == "in_pool"
    for query in ("", "?id=zz", "?id=00", "?key=a&id=00"):
        assert _get(pair.reader, f"/explain.json{query}")[0] == 400


def test_nothing_is_changed_and_nobody_elses_name_is_answered_to(pair: Pair) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{pair.reader.metrics_port}/", method="POST", data=b"")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=10)  # noqa: S310
    assert _get(pair.reader, "/", Host="evil.example:80")[0] == 403
    assert _get(pair.reader, "/", Host="localhost:80")[0] == 200
    assert _get(pair.reader, "/../etc/passwd")[0] == 404
    assert _get(pair.reader, "/metrics", Host="prometheus.example")[0] == 200


def _site(host: str, token: str) -> Site:
    def explain(*_: object) -> None:
        raise AssertionError

    return Site(host, token, dict, explain)  # type: ignore[arg-type]


def _status(site: Site, path: str = "/cluster.json", query: str = "", **environ: str) -> str:
    page = site.answer({"PATH_INFO": path, "QUERY_STRING": query, "HTTP_HOST": "127.0.0.1:9"} | environ)
    assert page is not None
    return page.status[:3]


def test_off_loopback_only_who_has_the_token_sees_anything() -> None:
    assert _status(_site("0.0.0.0", "")) == "403"
    site = _site("10.0.0.5", TOKEN)
    for path in ("/", "/page.js", "/cluster.json", "/explain.json"):
        assert _status(site, path) == "403"
    assert _status(site, query="token=another-token-of-a-test") == "403"
    assert _status(site, HTTP_AUTHORIZATION=f"Basic {TOKEN}") == "403"
    assert _status(site, HTTP_AUTHORIZATION=f"Bearer {TOKEN}") == "200"
    assert _status(site, HTTP_COOKIE=f"a=b; p2pkv_token={TOKEN}") == "200"
    assert _status(site, HTTP_COOKIE="p2pkv_token=\xff") == "403"
    page = site.answer({"PATH_INFO": "/", "QUERY_STRING": f"token={TOKEN}"})
    assert page is not None
    assert (page.status[:3], page.headers["Location"]) == ("303", "/")
    assert "HttpOnly; SameSite=Strict" in page.headers["Set-Cookie"]


def test_a_token_is_no_guess_and_in_no_log() -> None:
    with pytest.raises(ConfigError, match="16 to 256"):
        Config(dashboard_token="short")
    with pytest.raises(ConfigError, match="16 to 256"):
        Config(dashboard_token="with a space and; more")
    assert TOKEN not in repr(Config(dashboard_token=TOKEN))


# in a browser


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.timeout(600)
def test_a_browser_shows_the_numbers_of_the_metrics_and_the_console_is_silent(
    pair: Pair, tmp_path: Path
) -> None:
    keys = pair.publish()
    assert pair.reader.fetch(keys, pair.destination).all()
    pair.reader.fetch(["nobody has it"], pair.destination[:1])
    url = f"http://127.0.0.1:{pair.reader.metrics_port}/?theme=dark&key={keys[0]}"
    page, console = browse(url, tmp_path)
    assert console == ""
    assert 'data-theme="dark"' in page
    assert "500 ms" in page  # half of the axis of publishes, of which there are none meanwhile
    shown = {
        (node, metric): float(value)
        for node, row in re.findall(r'<tr data-node="(\w+)">(.*?)</tr>', page, re.DOTALL)
        for metric, value in re.findall(r'data-metric="(\w+)" data-value="([^"]+)"', row)
    }
    for node in pair.nodes:
        counters = node.counters()
        for metric in (
            *("p2pkv_pool_pages", "p2pkv_fetched_pages_total", "p2pkv_missed_pages_total"),
            *("p2pkv_published_pages_total", "p2pkv_evicted_pages_total"),
        ):
            counted = sum(value for name, value in counters.items() if name.partition("{")[0] == metric)
            assert shown[node.node_id, metric] == counted, (node.node_id, metric)
    text = html.unescape(page)
    assert "owner has it in its pool" in text
    assert "not_found: nobody was known to have it" in text
    assert page.count("<svg") == 4
