"""Options of single transports: where they are set, what is refused, and the settings that they used to be."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from test_cli import run

from p2pkv import transports
from p2pkv.config import Config
from p2pkv.errors import ConfigError, TransportError
from p2pkv.transports.base import TransportSettings
from p2pkv.transports.native import TcpOptions, TcpTransport
from p2pkv.transports.options import TransportOptions, former, former_settings


@dataclass(frozen=True, slots=True)
class AllKinds(TransportOptions):
    is_fast: bool = True
    n_lanes: int = 2
    patience: float = 0.5
    color: str = former("red", "old_color")
    hosts: tuple[str, ...] = ()


def test_every_kind_of_option_is_read_from_values_and_from_text() -> None:
    expected = AllKinds(is_fast=False, n_lanes=3, patience=1.5, color="blue", hosts=("a", "b"))
    typed = {"is_fast": False, "n_lanes": 3, "patience": 1.5, "color": "blue", "hosts": ["a", "b"]}
    text = {"is_fast": "false", "n_lanes": "3", "patience": "1.5", "color": "blue", "hosts": "a, b"}
    assert AllKinds.parse("mine", typed) == AllKinds.parse("mine", text) == expected
    assert AllKinds.parse("mine", {}) == AllKinds()
    assert str(AllKinds()) == "is_fast True, n_lanes 2, patience 0.5, color 'red', hosts ()"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"n_lane": 1}, "transport_options of mine: unknown option 'n_lane'; did you mean 'n_lanes'"),
        ({3: 1}, "unknown option 3; it has"),
        ({"zzz": 1}, "unknown option 'zzz'; it has is_fast, n_lanes, patience, color, hosts"),
        ({"n_lanes": "two"}, "transport_options of mine: n_lanes must be a whole number, not 'two'"),
        ({"n_lanes": True}, "n_lanes must be a whole number, not True"),
        ({"is_fast": "maybe"}, "is_fast must be true or false"),
        ({"patience": None}, "patience must be a number"),
        ({"color": 7}, "color must be valid Unicode"),
        ({"hosts": [1]}, "hosts must be a list of strings"),
    ],
)
def test_an_option_that_is_not_there_or_cannot_be_so_is_refused_by_name(
    values: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        AllKinds.parse("mine", values)


def test_a_transport_without_options_says_that_it_has_none() -> None:
    with pytest.raises(ConfigError, match="transport_options of shm: unknown option 'size'; it has none"):
        Config(transport_options={"shm": {"size": 1}})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tpc": {"streams": 4}}, "transport_options: unknown transport 'tpc'; did you mean 'tcp'"),
        ({"tcp": {"stream": 4}}, "transport_options of tcp: unknown option 'stream'; did you mean 'streams'"),
        (
            {"tcp": {"streams": 9}},
            "transport_options of tcp: streams must be 1 to 8, or 0 for as many as pay, not 9",
        ),
        ({"tcp": {"port": 65536}}, "transport_options of tcp: port must be 0 to 65535"),
        (
            {"ucx": {"library": "wheal"}},
            "library must be auto, system, wheel or the path of a file, not 'wheal'",
        ),
        ({"tcp": 4}, "transport_options must have an object of options for each transport"),
        ("{'tcp': 4}", "transport_options must be JSON such as"),
        ('["tcp"]', "transport_options must have an object of options for each transport"),
    ],
)
def test_settings_with_options_that_cannot_be_are_refused(options: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Config.load({"transport_options": options}, environ={})


def test_options_come_from_a_file_the_environment_and_the_command_line(tmp_path: Path) -> None:
    text = '{"tcp": {"streams": 4}, "verbs": {"devices": "mlx5_0, mlx5_1"}}'
    expected = {"tcp": {"streams": 4}, "verbs": {"devices": ("mlx5_0", "mlx5_1")}}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"transport_options": json.loads(text)}))
    assert Config.load(path, environ={}).options == expected
    assert Config.load({}, environ={"P2PKV_TRANSPORT_OPTIONS": text}).options == expected
    lines = run("doctor", "--jsonl", "--set", f"transport_options={text}").stdout.splitlines()
    says = {finding["what"]: finding["says"] for finding in map(json.loads, lines)}
    assert says["options of tcp"] == "port 0, streams 4, addresses (), encrypt False"
    assert (
        says["options of verbs"] == "devices ('mlx5_0', 'mlx5_1'), library 'libibverbs.so.1', gpudirect False"
    )


def test_a_transport_is_started_with_its_options() -> None:
    settings = TransportSettings(options={"tcp": {"streams": 5}})
    (transport,) = transports.create(["tcp"], settings)
    with transport, transport.open() as endpoint:
        assert endpoint.describe()[9] == 5, "the streams that this end would make"
    with TcpTransport() as first, pytest.raises(TransportError, match="cannot start the tcp"):
        transports.create(["tcp"], TransportSettings(options={"tcp": {"port": first.port}}))


@pytest.mark.parametrize(
    ("setting", "value", "options"),
    [
        ("verbs_devices", "mlx5_0,mlx5_1", {"verbs": {"devices": ("mlx5_0", "mlx5_1")}}),
        ("verbs_devices", ["mlx5_0"], {"verbs": {"devices": ("mlx5_0",)}}),
        ("ucx_library", "system", {"ucx": {"library": "system"}}),
        ("ucx_trust_network", "true", {"ucx": {"trust_network": True}}),
    ],
)
def test_a_setting_of_old_sets_the_option_and_is_warned_of_once(
    setting: str, value: object, options: dict[str, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert Config.load({setting: value}, environ={}).options == options
    (message,) = caplog.messages
    assert message.startswith(f"the setting {setting} has become an option: transport_options: ")
    spelling = json.loads(message.partition("transport_options: ")[2])
    assert Config(transport_options=spelling).options == options


def test_a_setting_of_old_comes_from_the_environment_and_joins_other_options() -> None:
    settings = {"transport_options": {"ucx": {"library": "system"}, "tcp": {"streams": 3}}}
    config = Config.load(settings, environ={"P2PKV_UCX_TRUST_NETWORK": "1"})
    assert config.options == {"ucx": {"library": "system", "trust_network": True}, "tcp": {"streams": 3}}


def test_a_setting_of_old_that_contradicts_the_option_is_refused() -> None:
    options = {"transport_options": {"ucx": {"trust_network": True}}}
    assert Config.load({"ucx_trust_network": "true", **options}, environ={}).options["ucx"]
    with pytest.raises(ConfigError, match="ucx_trust_network is False, but transport_options of ucx has"):
        Config.load({"ucx_trust_network": False, **options}, environ={})
    with pytest.raises(ConfigError, match=r"ucx_library, which is an option now: .*library must be auto"):
        Config.load({"ucx_library": "wheal"}, environ={})


def test_every_option_of_a_built_in_transport_can_be_said_and_has_a_word_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transports.md").read_text()
    for name in transports.names():
        options = transports.options_of(name)
        for field in fields(options):
            assert type(options).parse(name, {field.name: getattr(options, field.name)}) == options
            assert f"| `{name}` | `{field.name}` |" in page
    assert former_settings(AllKinds) == {"old_color": "color"}
    assert former_settings(TcpOptions) == {}


def test_former_settings_may_be_given_to_the_class_too(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(node_id="n", ucx_trust_network=True)  # type: ignore[call-arg]
    assert config.transport_options == {"ucx": {"trust_network": True}}
    assert "ucx_trust_network has become an option" in caplog.text
    again = dataclasses.replace(config, deadline=2.0)
    assert (again.transport_options, again.deadline) == (config.transport_options, 2.0)
    with pytest.raises(TypeError, match="colour"):
        Config(colour="red")  # type: ignore[call-arg]
