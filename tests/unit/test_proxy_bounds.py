"""Requests that are none, too large, too slow, or never end."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations, pairwise

import pytest

from front import COMPLETION, run, start, until
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy import guarded_http
from p2pkv_proxy.prompts import Prompt, read_chat
from rig import Rig

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b"[" * 100_000,
    b"{}",
    b'{"prompt": {}}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [1.5]}',
    b'{"prompt": ["a", 1]}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": true}',
    b'{"prompt": "a", "n": "two"}',
    b'{"prompt": "a", "stream": "yes"}',
    b'{"prompt": "a", "model": 7}',
]


def test_a_malformed_request_is_refused_and_reaches_no_engine() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        for body in MALFORMED:
            status, answer, _ = await front.post(body)
            assert status == 400, body
            assert answer["error"]["message"]
        for messages in (None, [], {}, [7], [{"content": "x"}], [{"role": 7}]):
            assert (await front.post({"messages": messages}, "/v1/chat/completions"))[0] == 400
        assert engine.requests == []

    run(test)


def test_an_oversized_body_is_refused_before_it_is_read() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)], max_body=1000)
        assert (await front.post({"prompt": "x" * 2000}))[0] == 413
        head = await _say(front.port, POST + b"content-length: 99999999999\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413")
        chunk = b"400\r\n" + b"x" * 0x400 + b"\r\n"
        assert (await _say(front.port, POST + b"transfer-encoding: chunked\r\n\r\n" + chunk)).startswith(
            b"HTTP/1.1 413"
        )

    run(test)


async def _send_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


def test_a_body_in_too_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_http, "MAX_PIECES", 100)

    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        body = json.dumps(COMPLETION).encode()
        for n_pieces, status in ((100, b"200"), (101, b"400"), (5000, b"400")):
            pieces = [b" "] * (n_pieces - 1) + [body]
            said = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            head = await _say(front.port, POST + b"transfer-encoding: chunked\r\n\r\n" + said)
            assert head.startswith(b"HTTP/1.1 " + status), n_pieces
        assert len(engine.requests) == 1
        # one that has its answer already, and goes on: there is nothing behind it that anybody could find
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionError):
            await _send_for_ever(writer, b"1\r\nx\r\n" * 1000)

    run(test)


def test_a_body_that_trickles_is_given_up() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)], body_timeout=0.3)
        head = await _say(front.port, POST + b"content-length: 100\r\n\r\n{", drops=b" ")
        assert head.startswith(b"HTTP/1.1 408")
        assert len(list(front.app.registry)) == 1

    run(test)


@pytest.mark.parametrize("said", [b"", b"POST /v1/compl", POST + b"x: y\r\n"])
def test_headers_that_trickle_end_the_connection(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_http, "HEADER_TIMEOUT_S", 0.3)

    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)])
        assert await _say(front.port, said, drops=b"a" if said else b"") == b""

    run(test)


def test_headers_without_an_end_are_refused() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)])
        endless = POST + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(200))
        assert (await _say(front.port, endless)).startswith(b"HTTP/1.1 431")
        assert (await _say(front.port, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")

    run(test)


@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
def test_a_wish_for_another_protocol_is_ignored(wish: bytes) -> None:
    """Java's HTTP client says so in every request without TLS, and its body counts all the same."""

    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        body = json.dumps(COMPLETION | {"prompt": "\r\nUpgrade: h2c\r\n\r\n"}).encode()
        head = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMA\r\n" % wish
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write((head + b"content-length: %d\r\n\r\n" % len(body) + body) * 2)
        await until(lambda: len(engine.requests) == 2)  # of one connection, which is still HTTP/1.1
        assert [asked["prompt"] for asked in engine.requests] == ["\r\nUpgrade: h2c\r\n\r\n"] * 2
        assert not {"upgrade", "x-upgrd", "http2-settings", "connection"} & set(engine.headers[0])
        writer.transport.abort()

    run(test)


def test_a_wish_is_hidden_however_headers_are_cut_and_nothing_else_is() -> None:
    head = b"\r\n".join(
        (
            b"GET /upgrade: HTTP/1.1",
            b"transfer-encoding: chunked",
            b"up: UPGRADE: x",
            b"uPgrade: h2c",
            b"upgrade:",
        )
    )
    said = head + b"\r\n\r\nbody\r\nupgrade: x"
    expected = said.replace(b"\r\nuPgrade", b"\r\nx-upgrd").replace(b"\r\nupgrade:\r\n", b"\r\nx-upgrd:\r\n")
    for cuts in combinations(range(1, len(said)), 2):
        passed = held = b""
        for begin, stop in pairwise((0, *cuts, len(said))):
            if b"\r\n\r\n" in passed:  # the rest is the body's, which nobody looks at
                passed += said[begin:stop]
                continue
            more, held = guarded_http.without_upgrade(passed[-3:], held + said[begin:stop])
            passed += more
        assert held == b""
        assert passed == expected, cuts


def test_headers_behind_the_end_of_another_request_may_be_cut_anywhere() -> None:
    second = b"GET /healthz HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"

    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)])
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        # a name that is cut is not known for a wish, which nobody has in requests that wait for others
        name = second.index(b"upgrade: h2c")
        for cut in [n for n in range(1, len(second)) if not name < n < name + len(b"upgrade:")]:
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" + second[:cut])
            assert b"200 OK" in await reader.readuntil(b"}"), cut
            writer.write(second[cut:])
            assert b"200 OK" in await reader.readuntil(b"}"), cut
        writer.close()

    run(test)


def test_a_client_that_does_not_read_is_dropped_and_its_engine_freed() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine], client_timeout=0.3)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
        body = json.dumps(COMPLETION | {"stream": True, "max_tokens": 60_000}).encode()
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: engine.requests != [])
        await until(lambda: all(tracked.in_flight == 0 for tracked in front.app.registry))
        await until(lambda: front.app._serving.in_flight == 0)  # it ends a moment after its attempt
        assert await front.metric("p2pkv_proxy_requests_total", outcome="client_gone") == 1
        assert not reader.at_eof()
        writer.transport.abort()

    run(test)


def test_pages_work_and_unknown_paths_do_not() -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)])
        await front.text(COMPLETION)
        for path, word in (
            ("/", b"instance"),
            ("/metrics", b"p2pkv_proxy_requests_total"),
            ("/healthz", b"true"),
        ):
            async with front.session.get(front.url + path) as response:
                assert response.status == 200
                assert word in await response.read()
        for method, path in (
            ("GET", "/v1/completions"),
            ("POST", "/nothing"),
            ("POST", "/instances/x/drain"),
        ):
            async with front.session.request(method, front.url + path) as response:
                assert response.status in (404, 405)

    run(test)


async def _say(port: int, data: bytes, drops: bytes = b"") -> bytes:
    """Send bytes, then one drop at a time; return what the router says until it hangs up or has sent a head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(drops)

    dripping = asyncio.ensure_future(drip())
    try:
        return await reader.read(100)
    except ConnectionError:
        return b""
    finally:
        dripping.cancel()
        writer.transport.abort()


def test_line_ends_behind_a_body_harm_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        monkeypatch.setattr(guarded_http, "HEADER_TIMEOUT_S", 0.3)
        engine = await rig.engine(Role.BOTH, token_gate=asyncio.Semaphore(1))
        front = await start(rig, [engine])
        body = json.dumps(COMPLETION | {"max_tokens": 40, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"data: ")
        writer.write(b"\r\n")  # RFC 9112, 2.2: to be ignored
        await asyncio.sleep(3 * guarded_http.HEADER_TIMEOUT_S)  # what would end it has its time
        for _ in range(40):
            engine.token_gate.release()
        await reader.readuntil(b"[DONE]")
        writer.write(b"\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b'"ready"')
        writer.close()

    run(test)


def test_a_picture_counts_for_what_models_make_of_it_and_is_told_from_another() -> None:
    def chat(*parts: object) -> Prompt:
        return read_chat({"messages": [{"role": "user", "content": list(parts)}]})  # type: ignore[dict-item]

    def picture(letter: str) -> dict[str, object]:
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{letter * 1_000_000}"},
        }

    text = {"type": "text", "text": "what is this? " * 100}
    one, other = chat(picture("a"), text), chat(picture("b"), text)
    assert 1000 < one.n_tokens < 2000
    assert one.n_tokens == chat(picture("a"), text).n_tokens
    assert len(one.blocks()) < 20
    assert one.blocks()[0] == chat(picture("a"), text).blocks()[0] != other.blocks()[0]
    assert chat(text).n_tokens < 500


@pytest.mark.parametrize("name", ["req_abc", "a.b-c:d/e+f=g~h@i", "00-4bf92f3577b34da6a3ce929d0e0e4736-01"])
def test_request_ids_pass_unchanged(name: str) -> None:
    async def test(rig: Rig) -> None:
        front = await start(rig, [await rig.engine(Role.BOTH)])
        _, _, headers = await front.post(COMPLETION, **{"x-request-id": name})
        assert headers["x-request-id"] == name
        _, _, headers = await front.post(COMPLETION, **{"x-request-id": 'a"b'})
        assert headers["x-request-id"] != 'a"b'

    run(test)
