"""Choosing transports: by preference, by domain, and with errors that say what to do."""

from __future__ import annotations

import pytest

from p2pkv import transports
from p2pkv.errors import ConfigError, TransportError


def test_auto_prefers_shm_to_verbs_to_tcp() -> None:
    assert transports.AUTO == ("shm", "verbs", "tcp")
    can_run = [name for name in transports.AUTO if transports.available()[name] is None]
    assert transports.wanted("auto") == can_run


def test_verbs_by_name_where_it_is_not_says_what_is_missing() -> None:
    missing = transports.available()["verbs"]
    if missing is None:
        pytest.skip("verbs can run here")
    with pytest.raises(TransportError, match="transport 'verbs' can't run here") as raised:
        transports.wanted(["verbs"])
    assert missing in str(raised.value)
    assert "verbs" not in transports.wanted("auto")


def test_names_are_taken_in_the_order_given() -> None:
    assert transports.wanted(["tcp", "shm"]) == ["tcp", "shm"]
    assert transports.wanted("local") == ["local"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown transport 'tpc'; did you mean 'tcp'"):
        transports.wanted(["tpc"])
    with pytest.raises(ConfigError, match=r"there are .*local.*shm.*tcp"):
        transports.transport_class("quantum")
    with pytest.raises(ConfigError, match="empty"):
        transports.wanted([])


def test_everything_built_in_says_whether_it_can_run() -> None:
    assert transports.available()["tcp"] is None
    assert set(transports.available()) >= {"shm", "verbs", "tcp", "local"}


def test_transports_of_equal_domains_connect_a_pair_best_first() -> None:
    ours = {"shm": "host-1", "tcp": "tcp"}
    assert transports.connecting(ours, {"tcp": "tcp", "shm": "host-1"}) == ["shm", "tcp"]
    assert transports.connecting(ours, {"shm": "host-2", "tcp": "tcp"}) == ["tcp"]
    assert transports.connecting(ours, {"other": "tcp"}) == []
