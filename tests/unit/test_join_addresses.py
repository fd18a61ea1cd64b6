"""What is said of join addresses at which nobody answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random

import pytest

from p2pkv.directory.membership.join_addresses import JoinAddresses
from p2pkv.directory.membership.timing import Timing

ADDRESS = "10.0.0.9:7400"


class Elsewhere:
    """A network in which join addresses are other machines'."""

    address = "10.0.0.1:7400"

    def resolve(self, address: str) -> list[str]:
        return [address]

    def why_silent(self, address: str, tell: Callable[[str], None]) -> None:
        tell("does not let us in")

    def listen_also(self, address: str) -> bool:
        return False


@pytest.fixture
def addresses() -> JoinAddresses:
    joined = JoinAddresses([ADDRESS], Elsewhere(), Timing(), Random(0))  # type: ignore[arg-type]
    joined.take_free()
    return joined


def warned(
    addresses: JoinAddresses, caplog: pytest.LogCaptureFixture, n: int, *, is_alone: bool
) -> list[str]:
    """Return what was said while ``n`` probes had no answer."""
    caplog.clear()
    for _ in range(n):
        addresses.silent(ADDRESS, is_alone=is_alone)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_node_that_is_alone_says_so_again_and_ever_less_often(
    addresses: JoinAddresses, caplog: pytest.LogCaptureFixture
) -> None:
    said = warned(addresses, caplog, 100, is_alone=True)
    assert len(said) == 3, "after 5, 20 and 80 silences"
    assert all(
        ADDRESS in line and "this node is alone" in line and "does not let us in" in line for line in said
    )
    assert len(warned(addresses, caplog, 7200, is_alone=True)) in (3, 4)


def test_a_node_that_knows_others_goes_on_without_it(
    addresses: JoinAddresses, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = warned(addresses, caplog, 10, is_alone=False)
    assert said.endswith("this node goes on without it")


def test_a_member_that_died_is_no_join_address(
    addresses: JoinAddresses, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(100):
        addresses.silent("10.0.0.77:40255", is_alone=False)
    assert caplog.text == ""


def test_a_second_outage_is_said_like_the_first(
    addresses: JoinAddresses, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert len(warned(addresses, caplog, 10, is_alone=True)) == 1
    addresses.answered(ADDRESS)
    assert f"join address {ADDRESS} answers" in caplog.text
    assert len(warned(addresses, caplog, 10, is_alone=True)) == 1
    caplog.clear()
    addresses.answered(ADDRESS)
    addresses.answered(ADDRESS)
    assert caplog.text.count("answers") == 1
