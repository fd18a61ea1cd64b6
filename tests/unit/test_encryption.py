"""``encrypt: tcp``: where it is said, who reads whom, and what is said of those who differ."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from can_encrypt import needs_libcrypto
from cluster import eventually
from p2pkv import Config, Node, transports
from p2pkv.errors import ConfigError, TransportError
from p2pkv.testing.ports import free_port
from p2pkv.transfers import RowStatus
from p2pkv.transports.base import TransportSettings
from p2pkv.transports.native import TcpTransport
from pair import Pair
from transfer_pair import TransferPair


def test_the_setting_is_an_option_of_the_transport() -> None:
    assert Config(encrypt="tcp").options == {"tcp": {"encrypt": True}}
    assert Config(encrypt=["tcp"], transport_options={"tcp": {"streams": 3}}).options == {
        "tcp": {"streams": 3, "encrypt": True}
    }
    assert Config().options == {}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"encrypt": "verbs"}, "verbs can't encrypt what it carries; tcp can"),
        ({"encrypt": "tpc"}, "did you mean 'tcp'"),
        ({"encrypt": "tcp", "transport_options": {"tcp": {"encrypt": False}}}, "encrypt false"),
    ],
)
def test_what_can_not_be_encrypted_is_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Config.load(settings, environ={})


def test_without_the_library_nobody_goes_on_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv._native.encryption_missing", lambda: "libcrypto.so.3 can't be loaded")
    options = Config(encrypt="tcp").options
    for asked in ("auto", ["tcp"]):
        with pytest.raises(TransportError, match="tcp can't be encrypted: libcrypto"):
            transports.wanted(asked, options)
    assert "tcp" in transports.wanted("auto")


@needs_libcrypto
def test_what_carries_pages_as_they_are_beside_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare(TcpTransport):
        name = "bare"

    monkeypatch.setitem(transports.BUILT_IN, "bare", Bare)
    for options, n_said in ((Config(encrypt="tcp").options, 1), ({}, 0)):
        caplog.clear()
        for started in transports.create(["shm", "tcp", "bare"], TransportSettings(options=options)):
            started.close()
        said = "transport bare carries pages to other hosts as they are, though tcp encrypts"
        assert [said in line for line in caplog.messages] == [True] * n_said


@needs_libcrypto
def test_people_are_shown_what_is_encrypted(tmp_path: Path) -> None:
    with closing(Pair(tmp_path, transports=["tcp"], encrypt="tcp")) as pair:
        view = pair.reader._parts.membership.view()
        assert [transports.described(member.transports) for member in view.values()] == [
            "tcp (encrypted)"
        ] * 2
    assert transports.described({"shm": "shm:1:2", "tcp": "tcp"}) == "shm, tcp"
    settings = TransportSettings(options=Config(encrypt="tcp").options)
    (remark,) = transports.remarks("tcp", settings)
    assert remark.says.startswith("pages over tcp are encrypted, by OpenSSL 3")


@needs_libcrypto
def test_nodes_that_encrypt_read_each_other(tmp_path: Path) -> None:
    pair = Pair(tmp_path, transports=["tcp"], encrypt="tcp")
    assert pair.fetch_is_right(pair.publish())
    assert pair.reader.counters()['p2pkv_forged_records_total{transport="tcp"}'] == 0
    pair.close()


@needs_libcrypto
def test_what_lies_on_a_peers_disk_comes_over_it(tmp_path: Path) -> None:
    common = {
        "join": [f"127.0.0.1:{free_port()}"],
        "transports": ["tcp"],
        "encrypt": "tcp",
        "pool_size": "64KiB",
    }
    disk = {"disk_path": str(tmp_path / "disk"), "disk_size": "8MiB"}
    keys = [f"k{i}" for i in range(8)]
    rows, target = np.ones((8, 4096), np.uint8), np.zeros((8, 4096), np.uint8)
    with (
        Node.start(Config.load({"node_id": "owner"} | common | disk, environ={})) as owner,
        Node.start(Config(node_id="reader", **common)) as reader,
    ):
        eventually(lambda: len(owner.members()) == len(reader.members()) == 2, 20.0)
        owner.register_memory(rows)
        reader.register_memory(target)
        # a disk that is late is not waited for: what it was to have would be left out
        eventually(lambda: owner.counters()["p2pkv_disk_suspended"] == 0, 20.0)
        assert owner.publish(keys, rows, timeout=20.0).all()
        eventually(lambda: owner.counters()["p2pkv_disk_stored_pages_total"] == len(keys), 20.0)
        for first in (0, 8):  # they have no room beside the first ones
            assert owner.publish([f"more {first + i}" for i in range(8)], rows, timeout=20.0).all()
        assert owner.whereabouts(keys).is_on_disk.all()
        eventually(lambda: bool(reader.fetch(keys, target, timeout=5.0).all()), 20.0)
        counted = reader.counters()
    assert target.all()
    assert counted['p2pkv_fetched_pages_total{source="tcp"}'] >= len(keys)
    assert counted['p2pkv_forged_records_total{transport="tcp"}'] == 0


@needs_libcrypto
def test_who_encrypts_and_who_does_not_say_so_and_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(tmp_path, transports=["tcp"])
    settings = {"secret_file": str(tmp_path / "secret"), "join": pair.owner.config.join, "pool_size": 1 << 20}
    sealed = Pair.start("sealed", list, settings | {"transports": ["tcp"], "encrypt": "tcp"})
    sealed.register_memory(pair.destination)
    keys = pair.publish()
    eventually(lambda: len(sealed.members()) == 3, 20.0)
    assert not sealed.fetch(keys, pair.destination).any()
    for one, other in (("owner", "sealed"), ("sealed", "owner")):
        ends = {"owner": "'tcp'", "sealed": "'tcp:aes-256-gcm'"}
        said = f"its end is {ends[other]} and this one {ends[one]}; set encrypt to the same on both"
        eventually(lambda: any(f"peer {other}" in line and said in line for line in caplog.messages), 20.0)  # noqa: B023  # called at once
    sealed.close()
    pair.close()


@needs_libcrypto
def test_transfers_go_over_it_and_not_to_who_does_not_encrypt() -> None:
    with closing(TransferPair(8, encrypt="tcp")) as pair:
        request = pair.name()
        pair.producer.transfers.offer(request, pair.from_rows())
        got = pair.consumer.transfers.get(pair.producer.node_id, request, pair.to_rows(), timeout=20.0)
        assert (got == RowStatus.OK).all()
        assert np.array_equal(pair.target, pair.source)
        join = pair.producer.address
        with Node.start(Config(node_id="plain", join=join, transports="tcp", pool_size="1MiB")) as plain:
            eventually(lambda: len(plain.members()) == 3, 20.0)
            plain.register_memory(pair.target)
            request = pair.name()
            offer = pair.producer.transfers.offer(request, pair.from_rows())
            got = plain.transfers.get(pair.producer.node_id, request, pair.to_rows(), timeout=1.0)
            offer.withdraw()
            assert not (got == RowStatus.OK).any()
            assert not pair.target.any()


@needs_libcrypto
@pytest.mark.parametrize("encrypt", ["tcp", ()], ids=["encrypts", "does not"])
def test_an_attached_engine_reads_other_hosts_if_it_encrypts_as_they_do(
    tmp_path: Path, encrypt: str | tuple[()], caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    path, join = f"unix:{tmp_path}/s", [f"127.0.0.1:{free_port()}"]
    keys, pages = ["a", "b"], np.ones((2, 4096), np.uint8)
    common = {"join": join, "transports": ["tcp"], "encrypt": "tcp", "pool_size": "1MiB", "replicas": 1}
    with (
        Node.start(Config(node_id="other", **common)) as other,
        Node.start(Config(node_id="host", attach_listen=path, **common)) as host,
    ):
        eventually(lambda: len(other.members()) == len(host.members()) == 2, 20.0)
        other.register_memory(pages)
        assert other.publish(keys, pages, timeout=20.0).all()
        with Node.start(Config(attach=path, transports=["tcp"], encrypt=encrypt)) as engine:
            target = np.zeros_like(pages)
            engine.register_memory(target)
            if encrypt:
                eventually(lambda: bool(engine.fetch(keys, target, timeout=5.0).all()), 20.0)
                assert target.all()
            else:
                said = "peer other is not read over tcp"
                eventually(lambda: any(said in line for line in caplog.messages), 20.0)
                assert not engine.fetch(keys, target, timeout=1.0).any()
