"""Two nodes joined by two network ports and a control network: one port at a time is cut, and no page is missed.

In network namespaces, so that the kernel's own TCP meets cables that lose packets without a word.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import NodeProcess, eventually
from p2pkv.testing.processes import ChildProcess
from p2pkv_bench.cables import CUTS, Cables, unavailable

WORKER = Path(__file__).parents[1] / "support/node_worker.py"
PAGE, N = 64 << 10, 64
KEYS = [f"page-{i}" for i in range(N)]
ROUNDS = int(os.environ.get("P2PKV_TEST_RAIL_ROUNDS", "4"))
DEADLINE = 5.0


class Placed(NodeProcess):
    """A node at one of the places, with cable 0 for the control plane and cables 1 and 2 for data."""

    def __init__(self, cables: Cables, place: str, secret: Path) -> None:
        self.node_id = place
        ChildProcess.__init__(self, [*cables.inside(place), sys.executable, str(WORKER)], name=place)
        rails = {"tcp": {"addresses": [cables.address(place, cable) for cable in (1, 2)]}}
        config = {
            "node_id": place,
            "listen": f"{cables.address(place, 0)}:7083",
            "join": [f"{cables.address('a', 0)}:7083"],
            "secret_file": str(secret),
            "transports": ["tcp"],
            "transport_options": rails,
            "pool_size": "16MiB",
            "deadline": DEADLINE,
        }
        self.settings = {"config": config}

    def bytes_over(self, rail: int) -> float:
        name = f'p2pkv_rail_bytes_total{{transport="tcp",rail="{rail}"}}'
        return float(self.call("counters").get(name, 0))


@pytest.fixture
def cables() -> Iterator[Cables]:
    if missing := unavailable():
        pytest.skip(missing)
    with Cables(3) as cables:
        yield cables


def _fetch(reader: NodeProcess) -> float:
    answer = reader.call("fetch", keys=KEYS, nbytes=PAGE, timeout=DEADLINE)
    missed = {name: n for name, n in reader.call("counters").items() if "missed" in name or "rail_" in name}
    assert answer["hits"] == [1] * N, f"after {answer['seconds']:.3f} s: {missed}"
    assert answer["wrong"] == []
    return float(answer["seconds"])


@pytest.mark.timeout(300)
def test_a_rail_that_is_cut_costs_no_page(cables: Cables, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    owner, reader = Placed(cables, "a", secret), Placed(cables, "b", secret)
    try:
        owner.start()
        reader.start()
        eventually(lambda: len(reader.call("members")) == 2, 10.0)
        assert owner.call("publish", keys=KEYS, nbytes=PAGE) == [1] * N
        usual, healing = [], []
        for number in range(ROUNDS):
            how, rail = CUTS[number % 3], number % 2

            def all_carry() -> bool:
                before = [reader.bytes_over(each) for each in (0, 1)]
                usual.append(_fetch(reader))
                return all(reader.bytes_over(each) > before[each] for each in (0, 1))

            if number % 4 < 3:  # else the other one has just been healed
                eventually(all_carry, 60.0)
            cables.cut(how, 1 + rail)
            healing.append(_fetch(reader))
            _fetch(reader)
            cables.heal(how, 1 + rail)
        counters = reader.call("counters")
        given_up = sum(n for name, n in counters.items() if name.startswith("p2pkv_rail_failures_total"))
        assert given_up >= ROUNDS / 2
        usual.sort()
        healing.sort()
        print(
            f"a fetch takes {usual[len(usual) // 2] * 1e3:.1f} ms, one that meets a cut rail "
            f"{healing[len(healing) // 2] * 1e3:.1f} ms, the longest of {ROUNDS} {healing[-1] * 1e3:.1f} ms"
        )
    finally:
        reader.close()
        owner.close()
