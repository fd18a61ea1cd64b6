"""The transport over UCX: RDMA and cloud fabrics through libucp, behind the interface of :mod:`p2pkv.transports.base`.

libucp is loaded at run time, once a process. Where there are RDMA devices the machine's own comes first, because it
knows them; elsewhere the one of the wheel ``libucx-cu12`` or ``-cu13``, which has tcp, shared memory and CUDA only
and is the newer one: distributions still have 1.13, which is refused over tcp. The promises are kept in
``native/src/transports/ucx``.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from p2pkv import _native
from p2pkv.errors import ConfigError, TransportError
from p2pkv.transports.base import TransportSettings
from p2pkv.transports.native import NativeTransport

_SONAME = "libucp.so.0"
_DEVICES = Path("/sys/class/infiniband")

_choice = os.environ.get("P2PKV_UCX_LIBRARY", "auto")


def use_library(choice: str) -> None:
    """Say which libucp to load: ``auto``, ``system``, ``wheel`` or a path. Of no effect once one is loaded."""
    global _choice
    if choice not in ("auto", "system", "wheel") and not Path(choice).is_file():
        raise ConfigError(f"ucx_library is {choice!r}: neither auto, system, wheel nor a file")
    if choice != "auto":
        _choice = choice


def libraries() -> list[str]:
    """Return what to try for libucp, in order: names the loader knows, or paths."""
    found = wheel_library()
    wheel = [] if found is None else [found]
    in_turn = [_SONAME, *wheel] if has_rdma_devices() else [*wheel, _SONAME]
    return {"auto": in_turn, "system": [_SONAME], "wheel": wheel}.get(_choice, [_choice])


def has_rdma_devices() -> bool:
    """Return whether the kernel knows an RDMA device, which the wheel's UCX could not use."""
    return _DEVICES.is_dir() and any(_DEVICES.iterdir())


def wheel_library() -> str | None:
    """Return where the wheel ``libucx`` has its libucp, if it is installed."""
    spec = find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / _SONAME
        if path.is_file():
            return str(path)
    return None


class UcxTransport(NativeTransport):
    """Any fabric UCX has a transport for; over tcp on loopback only, unless the network is trusted.

    Binds ``host``, or ``advertise`` if that is a wildcard: UCX would otherwise connect over every interface.
    """

    name = "ucx"

    def __init__(self, host: str = "127.0.0.1", *, advertise: str = "", trusts_network: bool = False) -> None:
        if (missing := self.unavailable()) is not None:
            raise TransportError(f"cannot start the ucx transport: {missing}")
        try:
            super().__init__(_native.ucx_transport(host, advertise, trusts_network))
        except RuntimeError as error:
            raise TransportError(f"cannot start the ucx transport: {error}") from error

    @classmethod
    def create(cls, settings: TransportSettings) -> UcxTransport:
        return cls(settings.host, advertise=settings.advertise, trusts_network=settings.ucx_trust_network)

    @classmethod
    def unavailable(cls) -> str | None:
        if sys.platform != "linux":
            return f"ucx needs Linux, this is {sys.platform}"
        reasons = []
        for library in libraries():
            reason = _native.ucx_missing(library)
            if not reason:
                return None
            reasons.append(reason)
        advice = "install UCX 1.14 or later, or pip install 'p2pkv[ucx]'"
        return (
            f"no libucp can be loaded ({'; '.join(reasons) or 'the wheel libucx is not installed'}); {advice}"
        )
