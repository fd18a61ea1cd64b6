"""Which systems are compared, and how each of them is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

OURS = "p2pkv"
NIXL_CMA = "NIXL cma"

_CMA = "posix,cma,self"
_MOONCAKE = "mooncake-transfer-engine-non-cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system in one configuration."""

    name: str
    """What tables call it."""
    module: str
    """Of this package; it has what :mod:`p2pkv_bench.peers.base` says."""
    package: str
    options: Mapping[str, object] = field(default_factory=dict)
    moves_pages: bool = True
    """It has an ``Owner`` and a ``Reader``."""
    has_pool: bool = True
    """It has a ``Pool``; who has none registers its user's memory, and has a ``Registered``."""
    spins: bool = False
    """Its threads take a core each even when nothing is asked of them: its owner stands still outside its turns."""

    @property
    def about(self) -> str:
        """Its name and the version that is installed."""
        return f"{self.name} ({self.package} {version(self.package)})"


SYSTEMS = (
    System(
        name=NIXL_CMA,
        module="nixl",
        package="nixl",
        options={"tls": _CMA, "progress_thread": False},
        has_pool=False,
    ),
    System(
        name=f"{NIXL_CMA} + thread",
        module="nixl",
        package="nixl",
        options={"tls": _CMA, "progress_thread": True},
        has_pool=False,
        spins=True,
    ),
    System(
        name="NIXL tcp",
        module="nixl",
        package="nixl",
        options={"tls": "tcp,self", "progress_thread": True},
        has_pool=False,
        spins=True,
    ),
    System(name="Mooncake TE", module="mooncake", package=_MOONCAKE, has_pool=False),
    System(name="Mooncake Store", module="mooncake_store", package=_MOONCAKE),
    System(name="PeerCache", module="peercache", package="peercache"),
)
"""All but p2pkv, which every one of them is compared with."""

OWN = (
    System(name=OURS, module="ours", package="p2pkv", moves_pages=False),
    System(
        name="p2pkv, touched behind",
        module="ours",
        package="p2pkv",
        options={"prefault": "behind"},
        moves_pages=False,
    ),
)
"""p2pkv where each system is started by itself; pages it moves between the nodes of a pair."""
