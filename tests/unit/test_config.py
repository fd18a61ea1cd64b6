"""Settings: clear errors, nothing guessed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields
from pathlib import Path

import pytest

from p2pkv import Node
from p2pkv.address import reachable_host
from p2pkv.config import Config
from p2pkv.control.secret import cluster_keys
from p2pkv.errors import ConfigError
from p2pkv.values import parse_size


def test_every_setting_has_a_default() -> None:
    config = Config()
    assert config.pool_nbytes == 256 << 20
    assert config.listen == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2_000_000_000),
        ("4096", 4096),
        (512, 512),
        ("8kib", 8192),
    ],
)
def test_sizes_are_read_in_every_unit(text: str | int, nbytes: int) -> None:
    assert parse_size("pool_size", text) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("1Gi", 2**30), ("1.5GiB", 3 * 2**29), ("64GB", 64 * 10**9)])
def test_sizes_as_people_and_kubernetes_write_them(text: str, nbytes: int) -> None:
    assert parse_size("pool_size", text) == nbytes


@pytest.mark.parametrize("text", ["1G", "64m", "2.5t"])
def test_a_size_that_kubernetes_and_docker_read_differently_is_asked_about(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"pool_size is '{text}', which is .*B to Kubernetes and .*iB to Docker"
    ):
        parse_size("pool_size", text)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "64 MiBs", "1e6", True, None])
def test_a_size_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="pool_size must be a size such as 67108864 or '64MiB'"):
        parse_size("pool_size", text)


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'pool_sise'; did you mean 'pool_size'"):
        Config.load({"pool_sise": "1GiB"}, environ={})


def test_an_unknown_environment_variable_is_said_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Config.load(environ={"P2PKV_JION": "127.0.0.1:7400", "P2PKV_TEST_GPU": "1"}).join_addresses == ()
    assert caplog.messages == ["environment variable P2PKV_JION is no setting of p2pkv; did you mean 'join'?"]


def test_what_kubernetes_says_of_services_is_no_setting(caplog: pytest.LogCaptureFixture) -> None:
    service = {
        "SERVICE_HOST": "10.96.0.7",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.96.0.7:8000",
        "PORT_8000_TCP": "tcp://10.96.0.7:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.96.0.7",
    }
    names = ("P2PKV", "P2PKV_ROUTER", "P2PKV_METRICS")  # of Services p2pkv, p2pkv-router and p2pkv-metrics
    environ = {f"{name}_{key}": text for name in names for key, text in service.items()}
    assert Config.load(environ=environ).metrics_port is None
    assert not caplog.messages
    assert Config.load(environ={"P2PKV_METRICS_PORT": "9000"}).metrics_port == 9000


def test_the_host_engines_own_keys_are_let_through() -> None:
    config = Config.load(
        {"backend_name": "p2pkv", "pool_size": "1MiB"}, environ={}, host_keys={"backend_name"}
    )
    assert config.pool_nbytes == 1 << 20


def test_settings_win_over_the_environment_and_that_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "p2pkv.json"
    path.write_text(json.dumps({"deadline": 0.5}))
    config = Config.load(path, environ={"P2PKV_DEADLINE": "3", "P2PKV_JOIN": "127.0.0.1:1, 127.0.0.1:2"})
    assert config.deadline == 0.5
    assert config.join_addresses == ("127.0.0.1:1", "127.0.0.1:2")


def test_a_drawn_node_id_is_a_plain_string() -> None:
    assert type(Config().node_id) is str


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"membership": "embeded"}, "did you mean 'embedded'"),
        ({"membership": "static"}, "join must name every node"),
        ({"listen": "0.0.0.0:7400"}, "there is no secret_file"),
        ({"listen": "127.0.0.1"}, "listen must be HOST:PORT"),
        ({"join": ["127.0.0.1:0"]}, "needs a port other than 0"),
        ({"pool_size": 100}, "at least 65536"),
        ({"deadline": 0}, "deadline must be above 0"),
        ({"deadline": "soon"}, "deadline must be a number"),
        ({"replicas": 0}, "replicas must be 1 to 8"),
        ({"verify": "off"}, "verify must be one of generation, checksum"),
        ({"transports": []}, "transports is empty"),
        ({"transports": ["auto", "tcp"]}, "'auto' chooses by itself"),
        ({"node_id": ""}, "node_id must be 1 to 128 printable"),
        ({"node_id": "a\nb"}, "node_id must be 1 to 128 printable"),
        ({"disk_path": "/tmp/x"}, "disk_size is 0; set it as well"),
        ({"disk_size": "1GiB"}, "set node_id as well"),
        ({"disk_size": "1GiB", "node_id": "n", "disk_layout": "buckets"}, "did you mean 'bucket'"),
        ({"disk_fsync": "always"}, "disk_fsync must be one of never, seal, batch"),
        ({"disk_write": "later"}, "disk_write must be one of write_through, on_evict"),
        ({"disk_admission": "none"}, "disk_admission must be one of all, second_use"),
        ({"disk_compression": "lz4"}, "disk_compression must be one of off, zstd"),
        ({"metrics_port": 70000}, "metrics_port must be 0 to 65535"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Config.load(settings, environ={})


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("etcd://root:hunter2@127.0.0.1:2379", "a user before the @"),
        ("etcd://root:hunter?2@127.0.0.1:2379", "a user before the @"),
        (
            "https://root:hunter2@127.0.0.1:2379",
            "'https://...@127.0.0.1:2379' is of no kind that p2pkv knows",
        ),
        ("root:hunter2@127.0.0.1:2379", "must be one of embedded, .*; not '...@127.0.0.1:2379'"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(address: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        Config(membership=address)
    assert "hunter" not in str(refused.value)


def test_a_settings_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p2pkv.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object, not list"):
        Config.load(path, environ={})
    with pytest.raises(ConfigError, match="cannot read settings from"):
        Config.load(tmp_path / "missing.json", environ={})


def _secret(path: Path, content: str, mode: int = 0o600) -> str:
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_one_secret_gives_one_key_pair_and_another_another(tmp_path: Path) -> None:
    first = cluster_keys(_secret(tmp_path / "a", "correct horse battery\n"))
    again = cluster_keys(_secret(tmp_path / "b", "  correct horse battery"))
    other = cluster_keys(_secret(tmp_path / "c", "correct horse batterz"))
    assert first == again
    assert first.public != other.public
    assert first.private != other.private


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has mode 0644, so others can read it; chmod 600"):
        cluster_keys(_secret(tmp_path / "a", "correct horse battery", 0o644))


def test_a_short_or_missing_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 5 bytes; at least 16"):
        cluster_keys(_secret(tmp_path / "a", "short"))
    with pytest.raises(ConfigError, match="No such file"):
        cluster_keys(str(tmp_path / "missing"))


def test_a_secret_that_somebody_typed_to_get_going_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="has only 2 different bytes and is soon guessed; take a random one"
    ):
        cluster_keys(_secret(tmp_path / "a", "1212121212121212"))


def test_a_private_secret_is_made_once_and_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = cluster_keys(None)
    assert cluster_keys(None) == first
    path = tmp_path / "p2pkv" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_wildcard_is_advertised_as_the_address_peers_reach() -> None:
    assert reachable_host("10.1.2.3", []) == "10.1.2.3"
    assert reachable_host("0.0.0.0", ["127.0.0.1:7400"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match="listen on that address"):
        reachable_host("0.0.0.0", [])


def test_a_network_is_trusted_only_in_so_many_words() -> None:
    def trusted(**values: object) -> object:
        return Config(transport_options={"ucx": values}).options["ucx"]["trust_network"]

    assert trusted(trust_network="true") is True
    assert trusted(trust_network="0") is False
    with pytest.raises(ConfigError, match="trust_network must be true or false"):
        trusted(trust_network="maybe")


@pytest.mark.parametrize("wrong", [0, -1, 4096, 2**50, "lots"])
def test_a_staging_of_no_use_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="device_staging_size"):
        Config.load({"device_staging_size": wrong}, environ={})
    assert Config.load({"device_staging_size": "1MiB"}, environ={}).device_staging_nbytes == 1 << 20


ODD: tuple[object, ...] = (
    *(None, True, 0, -1, 2.7, float("nan"), float("inf"), -float("inf"), 10**30, -(10**30), b"x", object()),
    *(
        "",
        " ",
        "nan",
        "inf",
        "1e400",
        "9" * 5000,
        "9" * 400 + "TiB",
        "\udcff",
        "a\0b",
        "0x10",
        "²MiB",
    ),
    *([], [1], ["\udcff"], {}, {"a": 1}),
)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_an_odd_value_is_taken_or_refused_by_name_and_in_few_words(name: str) -> None:
    for value in ODD:
        refusal = _refusal(name, value)
        assert refusal == "" or name in refusal
        if name not in (
            "node_id",
            "listen",
            "join",
            "routers",
            "disk_path",
        ):  # whose messages quote them whole
            assert len(refusal) < 400


def _refusal(name: str, value: object) -> str:
    """Return why a setting can't have this value, or nothing; any other error than ours flies."""
    try:
        Config(**{name: value})  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return ""


def test_what_would_be_cut_off_or_lost_is_refused() -> None:
    for settings in ({"replicas": 2.7}, {"metrics_port": 80.5}, {"replicas": float("inf")}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            Config(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="secret_file must be a string, not int"):
        Config(secret_file=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no machine has more"):
        Config(pool_size="9" * 20 + "TiB")
    assert Config(pool_size="1.5GiB").pool_nbytes == 3 << 29


def test_every_way_to_write_a_wildcard_is_known_to_all_parts(tmp_path: Path) -> None:
    secret = _secret(tmp_path / "a", "correct horse battery")
    assert Config(listen="*:7400", secret_file=secret).listen == "0.0.0.0:7400"
    settings = {"secret_file": secret, "pool_size": "1MiB", "buffer_size": 0}
    with Node.start(Config(listen="*:0", join=["127.0.0.1:9"], **settings)) as node:  # type: ignore[arg-type]
        assert node.address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    "name", sorted(f.name for f in fields(Config) if type(f.default) in (int, float, bool))
)
def test_the_environment_s_text_of_a_number_is_the_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every setting that is a number or a switch, so that none is forgotten that comes."""
    default = getattr(Config(), name)
    monkeypatch.setenv(f"P2PKV_{name.upper()}", str(default).lower())
    found = getattr(Config.load(), name)
    assert found == default
    assert type(found) is type(default)


@pytest.mark.parametrize(
    ("given", "folder"), [("/a/b", "/a/b"), ("/a/b//", "/a/b"), ("/a/b/.", "/a/b"), ("//", "/")]
)
def test_a_suffix_of_disk_path_names_a_folder_beside_it(given: str, folder: str) -> None:
    config = Config(node_id="n1", disk_path=given, disk_size="8MiB")
    assert config.disk_path == dataclasses.replace(config).disk_path == folder
