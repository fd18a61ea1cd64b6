"""The transport over UCX: RDMA and cloud fabrics through libucp, behind the interface of :mod:`p2pkv.transports.base`.

libucp is loaded at run time. A process has one: a second would find the libraries of the first under it, because the
dynamic linker knows those by their bare names. So each transport says which libucp it wants, and one that wants another
than is loaded is refused, naming both. Where there are RDMA devices the machine's own comes first, because it
knows them; elsewhere the one of the wheel ``libucx-cu12`` or ``-cu13``, which has tcp, shared memory and CUDA only
and is the newer one: distributions still have 1.13, which is refused over tcp. The promises are kept in
``native/src/transports/ucx``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from p2pkv import _native
from p2pkv.errors import ConfigError, TransportError
from p2pkv.transports.base import Remark, TransportSettings
from p2pkv.transports.native import NativeTransport
from p2pkv.transports.options import UNSET, TransportOptions, former

_SONAME = "libucp.so.0"
_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class UcxOptions(TransportOptions):
    library: str = former("auto", "ucx_library")
    """The libucp to load: ``system``, ``wheel``, a path, or ``auto``: the one this process has, else the machine's own
    first where there are RDMA devices, elsewhere the wheel's."""
    trust_network: bool = former(False, "ucx_trust_network")
    """Use tcp beyond loopback: whoever reaches its port there can write to this process's memory."""

    def __post_init__(self) -> None:
        if self.library not in ("auto", "system", "wheel") and not Path(self.library).is_file():
            raise ConfigError(
                f"library must be auto, system, wheel or the path of a file, not {self.library!r}"
            )


def libraries(choice: str = "auto") -> list[str]:
    """Return what to try for libucp, in order: names the loader knows, or paths."""
    found = wheel_library()
    wheel = [] if found is None else [found]
    in_turn = [_SONAME, *wheel] if has_rdma_devices() else [*wheel, _SONAME]
    return {"auto": in_turn, "system": [_SONAME], "wheel": wheel}.get(choice, [choice])


def missing(choice: str) -> str | None:
    """Load the libucp that ``choice`` stands for; return None, or one sentence saying what is missing for it."""
    if sys.platform != "linux":
        return f"ucx needs Linux, this is {sys.platform}"
    reasons = []
    for library in libraries(choice):
        reason = _native.ucx_missing(library)
        if not reason:
            return None
        reasons.append(reason)
    why = "; ".join(reasons) or "the wheel libucx is not installed"
    if _native.ucx_library()[0]:  # another transport of this process has named the one it has
        return None if choice == "auto" else f"library {choice!r} can't be had: {why}"
    return f"no libucp can be loaded ({why}); install UCX 1.14 or later, or pip install 'p2pkv[ucx]'"


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
    options_class = UcxOptions
    confines_peers = False  # over tcp UCX takes whatever address a peer names

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        advertise: str = "",
        library: str = "auto",
        trusts_network: bool = False,
    ) -> None:
        if (reason := missing(library)) is not None:
            raise TransportError(f"cannot start the ucx transport: {reason}")
        try:
            super().__init__(_native.ucx_transport(host, advertise, trusts_network))
        except RuntimeError as error:
            raise TransportError(f"cannot start the ucx transport: {error}") from error

    @classmethod
    def create(cls, settings: TransportSettings) -> UcxTransport:
        options = settings.options_of(cls.name, UcxOptions)
        return cls(
            settings.host,
            advertise=settings.advertise,
            library=options.library,
            trusts_network=options.trust_network,
        )

    @classmethod
    def remarks(cls, settings: TransportSettings) -> Iterator[Remark]:
        """Tell which libucp is loaded, and what it can use for this node's address."""
        options = settings.options_of(cls.name, UcxOptions)
        if missing(options.library) is not None:
            return  # `unavailable` says it
        path, version = _native.ucx_library()
        try:
            resources = _native.ucx_resources(settings.host, options.trust_network)
        except RuntimeError as error:
            advice = (
                "`ucx_info -d` lists what UCX finds; another address of this machine may have an RDMA device"
            )
            if "libucx" in path:
                advice = "the wheel has no RDMA: install the system's UCX, or OFED's"
            yield Remark("UCX", f"{version} from {path}: {error}", advice)
        else:
            yield Remark("UCX", f"{version} from {path}, over {', '.join(resources)}")

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        return missing(UcxOptions.parse(cls.name, options).library)
