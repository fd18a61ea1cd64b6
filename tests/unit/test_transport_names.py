"""No part of p2pkv knows a transport by name: what differs between them is asked of their common interface."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pkv
from p2pkv import transports

PACKAGE = Path(p2pkv.__file__).parent

AT_HOME = ("transports", "bench", "testing")
"""The folders that may name them: their own, the benchmarks, which compare them, and what tests stand on."""

NEUTRAL = {
    "tcp://": "ZMQ's scheme of addresses",
    "tcp_endpoint": "SGLang's word for such an address",
    "/dev/shm": "a file system of the kernel",
    '{"tcp": {"streams": 4}}': "the example of how transport_options are written",
}
"""What holds the letters of a name and means something else, and why it stays."""

NAMES = sorted(set(transports.BUILT_IN) - {"local"})
"""Of those that are built in; ``local`` is also a word that everybody uses."""


def mentions(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and line of whatever names a built-in transport, be it in code, in text or in a comment."""
    names = [form for name in NAMES for form in (name, name.capitalize())]
    named = re.compile(rf"(?<![A-Za-z])({'|'.join(names)})(?![a-z])")
    for number, line in enumerate(text.splitlines(), 1):
        rest = line
        for neutral in NEUTRAL:
            rest = rest.replace(neutral, "")
        if named.search(rest):
            yield number, line.strip()


def test_no_transport_is_named_outside_of_its_folder() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{number}: {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in AT_HOME
        for number, line in mentions(path.read_text())
    ]
    assert found == []


def test_every_exception_is_needed() -> None:
    everything = "\n".join(
        path.read_text()
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in AT_HOME
    )
    for neutral in NEUTRAL:
        assert neutral in everything, f"{neutral} is not there any more"


@pytest.mark.parametrize(
    "line",
    [
        'if transport.name == "shm":',
        "from p2pkv.transports.ucx import UcxTransport",
        "verbs_devices: tuple[str, ...] = ()",
        "# over tcp a thread",
        "isinstance(way, TcpTransport)",
    ],
)
def test_a_name_is_found_wherever_it_stands(line: str) -> None:
    assert [number for number, _ in mentions(f"nothing here\n{line}")] == [2]


def test_other_words_are_left_alone() -> None:
    text = "socket.bind(f'tcp://{host}')\nusage('/dev/shm')\nverbose\nshmem_enabled\nTCP_NODELAY"
    assert list(mentions(text)) == []
