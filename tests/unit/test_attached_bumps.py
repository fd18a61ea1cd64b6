"""A bump of an attached engine reaches every member, whatever the engine has heard of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.attach.following import Following
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Reply
from p2pkv.directory.view import encode
from p2pkv.testing.ports import free_port

KEYS = ["a", "b"]
PAGES = np.ones((2, 4096), np.uint8)


class Hosts:
    """Nodes that know each other by their addresses; the first lets engines attach."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.path = f"unix:{folder}/s"
        (folder / "secret").write_text("the secret of a test, long enough\n")
        (folder / "secret").chmod(0o600)
        self._settings = {"secret_file": str(folder / "secret"), "pool_size": "1MiB"}
        self._join = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def start(self, number: int) -> Node:
        attach = {"attach_listen": self.path} if number == 0 else {}
        return Node.start(
            Config(
                node_id=f"h{number}", listen=self._join[number], join=self._join, **self._settings, **attach
            )  # type: ignore[arg-type]
        )

    def attach(self) -> Node:
        return Node.start(
            Config(node_id="engine", attach=self.path, secret_file=str(self._settings["secret_file"]))
        )


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


@pytest.fixture
def looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines keep the view that they started with: a thread that is starved looks as seldom."""
    monkeypatch.setattr(Following, "_turn", lambda self: None)


@pytest.mark.usefixtures("looks_no_more")
def test_a_node_that_came_after_the_engine_is_told(hosts: Hosts) -> None:
    with hosts.start(0) as first, hosts.attach() as engine, hosts.start(1) as late:
        eventually(lambda: len(first.members()) == len(late.members()) == 2, 30.0)
        late.register_memory(PAGES)
        assert late.publish(KEYS, PAGES, timeout=20.0).all()
        bumped = engine.bump(timeout=20.0)
        assert set(bumped.heard) == {"h0", "h1"}
        assert not bumped.unreached
        assert not late.exists(KEYS, timeout=20.0).any()


@pytest.mark.usefixtures("looks_no_more")
def test_the_hosts_node_is_told_though_nobody_has_said_that_it_is_back(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # and what it says when it is asked does not come
    with hosts.start(0) as first, hosts.attach() as engine:
        monkeypatch.setattr(Following, "_take_from", lambda self, address, timeout: False)
        first.close()
        with hosts.start(0) as again:
            eventually(lambda: engine.counters()["p2pkv_attached"] == 1, 30.0)
            engine._parts.following.view = engine._parts.following.view.replacing([], {"h0"})  # type: ignore[union-attr]
            bumped = engine.bump(timeout=20.0)
            assert not bumped.unreached
            assert again._parts.own_epoch == bumped.epoch


@pytest.mark.usefixtures("looks_no_more")
def test_the_hosts_node_that_is_back_is_named_by_its_id(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosts.start(0) as first, hosts.attach() as engine:
        monkeypatch.setattr(Following, "_take_from", lambda self, address, timeout: False)
        first.close()
        with hosts.start(0):
            eventually(lambda: engine.counters()["p2pkv_attached"] == 1, 30.0)
            assert engine.bump(timeout=20.0).heard == ("h0",)


def test_what_is_answered_late_takes_nobody_out_of_the_view(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosts.start(0) as first, hosts.attach() as engine:
        following = engine._parts.following  # type: ignore[union-attr]
        ask, earlier = following._client.ask, following._take_from
        with hosts.start(1):
            eventually(lambda: len(first.members()) == 2, 30.0)

            def asks_twice(request: Request, timeout: float) -> Reply | None:
                """Have a second question asked and answered while the answer to the first one is on its way."""
                old = ask(request, timeout)
                monkeypatch.setattr(following._client, "ask", ask)
                eventually(
                    lambda: earlier(request.address, 20.0) and len(following.view.present()) == 2, 30.0
                )
                return replace(old, body=alone) if old is not None else None

            alone = encode("h0", [member for member in following.view.present() if member.node_id == "h0"])
            monkeypatch.setattr(following._client, "ask", asks_twice)
            assert following._take_from(first.address, 20.0)
            assert len(following.view.present()) == 2
