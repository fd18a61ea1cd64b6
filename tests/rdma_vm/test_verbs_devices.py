"""Which devices and addresses verbs takes, what doctor says of them, and errors that name the limit they hit."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from p2pkv.config import Config
from p2pkv.errors import TransportError
from p2pkv.transports.verbs import VerbsTransport, ports

_missing = VerbsTransport.unavailable()
pytestmark = [
    pytest.mark.rdma_slow,
    pytest.mark.skipif(_missing is not None, reason=f"verbs: {_missing}"),
]

# Root may lock any amount unless it gives the right away.
_LIMITED = ["prlimit", "--memlock={limit}", "setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"]


def run_limited(limit: int, code: str) -> str:
    """Run Python code that may lock ``limit`` bytes; return what it printed, and then what it logged."""
    command = [part.format(limit=limit) for part in _LIMITED]
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_address_is_chosen_by_content() -> None:
    # index 0 of the table is a link-local one, which leads nowhere
    assert [(port.device, port.gid, port.link) for port in ports()] == [
        ("rxe0", "10.77.0.1", "RoCE v2"),
        ("rxe1", "10.77.0.2", "RoCE v2"),
    ]


def test_devices_ports_and_addresses_can_be_named() -> None:
    for choice in (["rxe1"], ["rxe1:1"], ["rxe0=10.77.0.1", "rxe1"]):
        with VerbsTransport(choice) as transport:
            assert transport.domain == "verbs:roce"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("mlx5_7", "no device mlx5_7"),
        ("rxe0:9", "no device rxe0:9"),
        ("rxe0=10.9.9.9", "no address 10.9.9.9"),
        ("rxe0=nonsense", "must be NAME"),
        ("rxe0:", "must be NAME"),
    ],
)
def test_a_device_that_is_not_there_is_named(choice: str, reason: str) -> None:
    with pytest.raises(TransportError, match=reason):
        VerbsTransport([choice])


def test_memory_registered_twice_is_good_until_both_are_closed() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    with VerbsTransport() as transport:
        regions = [
            transport.register_memory(memory, memory.ctypes.data, memory.nbytes, readable=False)
            for _ in range(2)
        ]
        for region in regions:
            region.close()


def test_the_limit_of_locked_memory_is_named_by_what_hits_it() -> None:
    said = run_limited(
        80 << 20,
        "import numpy as np\n"
        "from p2pkv.transports.verbs import VerbsTransport\n"
        "from p2pkv.errors import TransportError\n"
        "memory = np.zeros(200 << 20, np.uint8)\n"
        "with VerbsTransport() as transport:\n"
        "    try: transport.register_memory(memory, memory.ctypes.data, memory.nbytes, readable=True)\n"
        "    except TransportError as error: print(error)\n",
    )
    assert "RLIMIT_MEMLOCK is 81920 KiB" in said
    assert "ulimit -l" in said


def test_a_process_that_may_lock_next_to_nothing_leaves_verbs_out() -> None:
    said = run_limited(
        8 << 20,
        "from p2pkv import transports\nprint(transports.wanted('auto'), transports.available()['verbs'])\n",
    )
    assert "['shm', 'tcp']" in said
    assert "may lock 8192 KiB" in said


def test_a_pool_that_can_not_be_locked_costs_auto_verbs_and_nothing_else() -> None:
    said = run_limited(
        160 << 20,
        "import logging\n"
        "from p2pkv import Config, Node\n"
        "from p2pkv.errors import TransportError\n"
        "logging.basicConfig(format='%(message)s')\n"
        "def start(**settings): return Node.start(Config(listen='127.0.0.1:0', **settings))\n"
        # with the receive buffer 128 MiB on each rail
        "with start(pool_size='64MiB') as node: print([sorted(m.transports) for m in node.members()])\n"
        "one = {'verbs': {'devices': ['rxe0']}}\n"
        "with start(pool_size='64MiB', transport_options=one) as node: print('one rail', *node.members())\n"
        "try: start(pool_size='64MiB', transports=['verbs'])\n"
        "except TransportError as error: print('by name:', error)\n",
    )
    both, one, by_name, *warnings = said.splitlines()
    assert both == "[['shm', 'tcp']]"
    assert "verbs" in one
    assert "may lock 163840 KiB" in by_name
    assert "RLIMIT_MEMLOCK" in by_name
    assert len(warnings) == 1
    assert (
        "transport verbs is left out: cannot lock the pool and the receive buffer, 262144 KiB on all rails"
        in warnings[0]
    )


def test_doctor_shows_every_port() -> None:
    from p2pkv.cli.doctor import examine

    findings = {
        finding.what: finding
        for finding in examine(Config(transport_options={"verbs": {"devices": ["rxe1"]}}))
    }
    assert "read from itself and right" in findings["transport verbs"].says
    says = findings["rxe0 port 1"].says
    for part in ("RoCE v2", "active", "10.77.0.1", "MTU 4096", "NUMA node unknown"):
        assert part in says
    wrong = {
        finding.what: finding
        for finding in examine(Config(transport_options={"verbs": {"devices": ["rxe9"]}}))
    }
    assert "no device rxe9" in wrong["transport verbs"].says
    assert wrong["transport verbs"].as_record()["verdict"] == "bad"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert soft == resource.RLIM_INFINITY
    assert "unlimited" in findings["locked memory"].says
