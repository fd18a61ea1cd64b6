"""Who may talk to etcd: TLS with the right authority and with others, users, expired tokens, and rights that lack."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from certificates import Authority, needs_openssl
from etcd_servers import EtcdServers, needs_etcd
from p2pkv.directory.registry.etcd import EtcdStore
from p2pkv.directory.registry.store import Change, Entry
from p2pkv.errors import RegistryError
from p2pkv.store_url import read_store_url

pytestmark = [
    needs_etcd,
    pytest.mark.xdist_group("etcd"),
    needs_openssl,
]

TIMEOUT = 5.0


class Guarded:
    """An etcd that asks for certificates and users; ``options`` are what a node with every right is told."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.others = Authority(folder, "ours"), Authority(folder, "others")
        cert, key = self.ours.issue("server")
        self.files = {
            "ca": self.ours.ca,
            **dict(zip(("cert", "key"), self.ours.issue("client"), strict=True)),
        }
        self.servers = EtcdServers(
            folder,
            1,
            tls=[
                f"--cert-file={cert}",
                f"--key-file={key}",
                f"--trusted-ca-file={self.ours.ca}",
                "--client-cert-auth",
            ],
            client_flags=[
                f"--cacert={self.ours.ca}",
                f"--cert={self.files['cert']}",
                f"--key={self.files['key']}",
            ],
        )
        for command in (
            "role add node",
            "role grant-permission node readwrite --prefix=true /p2pkv/c/",
            "role add reader",
            "role grant-permission reader read --prefix=true /p2pkv/c/",
            "user add root:root-password",
            "user grant-role root root",
            *(f"user add {user}:{user}-password" for user in ("node", "reader")),
            *(f"user grant-role {user} {user}" for user in ("node", "reader")),
            "auth enable",
        ):
            self.servers.ctl(*command.split())
        self.passwords = {}
        for name in ("node", "reader", "wrong"):
            self.passwords[name] = folder / f"{name}.password"
            self.passwords[name].write_text(f"{name}-password\n")

    def store(self, user: str = "node", password: str = "", **options: object) -> EtcdStore:
        given = {**self.files, "user": user, "password_file": self.passwords[password or user], **options}
        query = "&".join(f"{name}={value}" for name, value in given.items() if value is not None)
        return EtcdStore(read_store_url(f"{self.servers.url}?{query}"), "c")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    yield made
    made.servers.close()


def test_a_user_with_rights_and_certificates_reads_writes_and_follows(guarded: Guarded) -> None:
    store, follower = guarded.store(), guarded.store()
    follower.watch(follower.read_all(TIMEOUT).version, TIMEOUT)
    version = store.put("n/0", b"record", 0, TIMEOUT)
    assert isinstance(version, int)
    assert follower.changes(TIMEOUT) == [Change("n/0", b"record", version)]
    assert store.put("n/0", b"another", 0, TIMEOUT) == Entry(b"record", version)
    assert store.renew("n/0", version, TIMEOUT)
    store.remove("n/0", TIMEOUT)
    assert [change.value for change in follower.changes(TIMEOUT)] == [None]
    for each in (store, follower):
        each.close()


def test_a_token_that_counts_no_more_is_replaced(guarded: Guarded) -> None:
    store = guarded.store()
    store.read_all(TIMEOUT)
    store._token += "x"  # as one that the server has forgotten
    store.read_all(TIMEOUT)
    store.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"password": "wrong"}, r"refuses user 'node'.*set the options user and password_file right"),
        ({"user": "nobody", "password": "node"}, r"refuses user 'nobody'"),
        ({"ca": "OTHERS"}, r"a certificate that no authority of .*others-ca.pem vouches for"),
        ({"cert": None, "key": None}, r"is a cert missing\?"),
        ({"cert": "EXPIRED"}, r"does it not take .*expired.pem, which may have expired"),
        ({"ca": "/nowhere/ca.pem"}, r"cannot read /nowhere/ca.pem for TLS: .*No such file"),
        ({"password_file": "/nowhere/password"}, r"cannot read password_file /nowhere/password"),
    ],
)
def test_who_may_not_talk_to_it_is_told_why(guarded: Guarded, options: dict[str, object], why: str) -> None:
    if options.get("ca") == "OTHERS":
        options = {"ca": guarded.others.ca}
    if options.get("cert") == "EXPIRED":
        options = dict(zip(("cert", "key"), guarded.ours.issue("expired", days=-1), strict=True))
    store = guarded.store(**options)  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match=why):
        store.read_all(TIMEOUT)
    store.close()


@pytest.mark.parametrize(
    ("issued", "why"),
    [
        (
            {"days": -1},
            r"out of date by this machine's clock: .*expired; give the server a new one, or set the clock",
        ),
        (
            {"host": "IP:127.0.0.9"},
            r"a certificate of another name: .*name the server as its certificate does",
        ),
    ],
)
def test_what_is_wrong_with_the_server_s_certificate_is_told_from_its_authority(
    guarded: Guarded, issued: dict[str, object], why: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*guarded.ours.issue("other-server", **issued))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            visitor, _ = listener.accept()
            with suppress(OSError), context.wrap_socket(visitor, server_side=True):
                pass

        greeting = threading.Thread(target=greet)
        greeting.start()
        port = listener.getsockname()[1]
        store = EtcdStore(read_store_url(f"etcds://127.0.0.1:{port}?ca={guarded.ours.ca}"), "c")
        with pytest.raises(RegistryError, match=why):
            store.read_all(TIMEOUT)
        store.close()
        greeting.join()


def test_a_user_without_rights_is_told_which_lack(guarded: Guarded) -> None:
    store = guarded.store("reader")
    store.read_all(TIMEOUT)
    with pytest.raises(RegistryError, match=r"does not let user 'reader' at /p2pkv/c/members/.*readwrite"):
        store.put("n0", b"record", 0, TIMEOUT)
    store.close()


def test_whoever_gives_no_user_is_told_that_one_is_wanted(guarded: Guarded) -> None:
    url = f"{guarded.servers.url}?{'&'.join(f'{name}={value}' for name, value in guarded.files.items())}"
    store = EtcdStore(read_store_url(url), "c")
    with pytest.raises(
        RegistryError, match=r"does not let whoever gives no user at .*set the options user and password_file"
    ):
        store.read_all(TIMEOUT)
    store.close()


def test_who_has_a_user_goes_on_where_etcd_wants_none_yet_or_no_more(tmp_path: Path) -> None:
    servers = EtcdServers(tmp_path, 1)
    (tmp_path / "password").write_text("root-password")
    for command in ("user add root:root-password", "user grant-role root root"):
        servers.ctl(*command.split())
    url = read_store_url(f"{servers.url}?user=root&password_file={tmp_path / 'password'}")
    store, follower = EtcdStore(url, "c"), EtcdStore(url, "c")
    follower.watch(follower.read_all(TIMEOUT).version, TIMEOUT)
    version = store.put("n0", b"record", 0, TIMEOUT)
    assert follower.changes(TIMEOUT) == [Change("n0", b"record", version)]
    servers.ctl("auth", "enable")
    store.read_all(TIMEOUT)
    servers.ctl("auth", "disable", flags=["--user=root:root-password"])
    assert isinstance(version, int)
    assert store.renew("n0", version, TIMEOUT) == version
    for each in (store, follower):
        each.close()
    servers.close()


def test_plain_http_to_tls_is_recognized(guarded: Guarded) -> None:
    store = EtcdStore(read_store_url(guarded.servers.url.replace("etcds://", "etcd://")), "c")
    with pytest.raises(RegistryError, match=r"does it want TLS.*etcds://"):
        store.read_all(TIMEOUT)
    store.close()


def test_tls_to_plain_http_is_recognized(tmp_path: Path) -> None:
    servers = EtcdServers(tmp_path, 1)
    store = EtcdStore(read_store_url(servers.url.replace("etcd://", "etcds://")), "c")
    with pytest.raises(RegistryError, match=r"is it plain HTTP"):
        store.read_all(TIMEOUT)
    store.close()
    servers.close()


def test_a_server_whose_certificate_is_none_of_a_client_is_recognized(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    cert, key = authority.issue("server", "serverAuth")
    own_cert, own_key = authority.issue("client")
    flags = [
        f"--cert-file={cert}",
        f"--key-file={key}",
        f"--trusted-ca-file={authority.ca}",
        "--client-cert-auth",
    ]
    client_flags = [f"--cacert={authority.ca}", f"--cert={own_cert}", f"--key={own_key}"]
    servers = EtcdServers(tmp_path, 1, tls=flags, client_flags=client_flags)
    store = EtcdStore(read_store_url(f"{servers.url}?ca={authority.ca}&cert={own_cert}&key={own_key}"), "c")
    with pytest.raises(RegistryError, match=r"needs the usage clientAuth too"):
        store.read_all(TIMEOUT)
    store.close()
    servers.close()
