"""The transport over NCCL: for GPUs whose network only NCCL knows, behind the interface of `p2pkv.transports.base`.

libnccl is loaded at run time, and never needed: the one that the engine has loaded already, that of the wheel
``nvidia-nccl``, which PyTorch brings, or the system's. NCCL moves bytes by kernels on a GPU, takes seconds to connect
two processes and memory of the GPU for each connection, so a node uses it only where it is asked to by name. The
promises are kept in ``native/src/transports/nccl``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import zmq.backend.cython._zmq

from p2pkv import _native
from p2pkv.errors import ConfigError, TransportError
from p2pkv.transports.base import Remark, TransportSettings
from p2pkv.transports.native import NativeTransport
from p2pkv.transports.options import UNSET, TransportOptions

_SONAME = "libnccl.so.2"
_SEVERAL_RANKS = (2, 30)
"""The first version that can have several ranks on a GPU."""
_MOST_CHANNELS = 32
"""NCCL has no more for two ranks."""
_MOST_COMMUNICATORS = 1024
"""Each has threads of its own; a guess."""


@dataclass(frozen=True, slots=True)
class NcclOptions(TransportOptions):
    library: str = "auto"
    """The libnccl to load: ``system``, ``wheel``, a path, or ``auto``: the one this process has, else the wheel's, else
    the machine's own."""
    device: int = 0
    """The ordinal of the CUDA device that sends and receives; two nodes that meet need one each."""
    channels: int = 4
    """At most so many of the device's multiprocessors copy for one peer at a time."""
    communicators: int = 32
    """At most so many connections of NCCL's, of both directions together; each takes memory of the device."""

    def __post_init__(self) -> None:
        if self.library not in ("auto", "system", "wheel") and not Path(self.library).is_file():
            raise ConfigError(
                f"library must be auto, system, wheel or the path of a file, not {self.library!r}"
            )
        if self.device < 0:
            raise ConfigError(f"device must be the ordinal of a CUDA device, not {self.device}")
        if not 1 <= self.channels <= _MOST_CHANNELS:
            raise ConfigError(f"channels must be 1 to {_MOST_CHANNELS}, not {self.channels}")
        if not 1 <= self.communicators <= _MOST_COMMUNICATORS:
            raise ConfigError(f"communicators must be 1 to {_MOST_COMMUNICATORS}, not {self.communicators}")


def libraries(choice: str = "auto") -> list[str]:
    """Return what to try for libnccl, in order: names the loader knows, or paths."""
    found = wheel_library()
    wheel = [] if found is None else [found]
    # The engine's own first, which is found by its name: two of a process would each set up every device.
    in_turn = [_SONAME, *wheel] if is_loaded() else [*wheel, _SONAME]
    return {"auto": in_turn, "system": [_SONAME], "wheel": wheel}.get(choice, [choice])


def missing_library(choice: str) -> str | None:
    """Load the libnccl that ``choice`` stands for; return None, or one sentence saying what is missing for it."""
    if sys.platform != "linux":
        return f"nccl needs Linux, this is {sys.platform}"
    if choice == "auto" and _native.nccl_library()[0]:
        return None  # another transport of this process has named the one it has
    reasons = []
    for library in libraries(choice):
        reason = _native.nccl_missing(library)
        if not reason:
            return None
        reasons.append(reason)
    why = "; ".join(reasons) or "the wheel nvidia-nccl is not installed"
    return f"no libnccl can be loaded ({why}); PyTorch for CUDA brings one, else pip install nvidia-nccl-cu12 or -cu13"


def missing(options: NcclOptions) -> str | None:
    """Return None, or one sentence saying what the transport lacks on this machine with these options."""
    if (reason := missing_library(options.library)) is not None:
        return reason
    try:
        _, devices = _native.cuda_driver()
    except RuntimeError as error:
        return f"NCCL moves bytes between GPUs, and no CUDA driver can be used: {error}"
    if options.device >= len(devices):
        return (
            f"there is no CUDA device {options.device}: {len(devices)} can be seen, see CUDA_VISIBLE_DEVICES"
        )
    return None


def is_loaded() -> bool:
    """Return whether this process has loaded a libnccl, as an engine on PyTorch has."""
    try:
        ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def wheel_library() -> str | None:
    """Return where the wheel ``nvidia-nccl`` has its libnccl, if it is installed."""
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no wheel of NVIDIA's is there
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / _SONAME
        if path.is_file():
            return str(path)
    return None


class NcclTransport(NativeTransport):
    """Peers with GPUs between which NCCL finds a way, and the same version of it.

    Listens on ``host`` for what readers ask; see :class:`NcclOptions`. Memory that peers may read is page-locked for
    the device for as long as it is registered.
    """

    name = "nccl"
    options_class = NcclOptions

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        advertise: str = "",
        ports: tuple[int, int] = (0, 0),
        options: NcclOptions | None = None,
    ) -> None:
        options = options or NcclOptions()
        if (reason := missing(options)) is not None:
            raise TransportError(f"cannot start the nccl transport: {reason}")
        # what the two ends say to each other is sealed by the libsodium that libzmq brings
        _native.load_zmq(zmq.backend.cython._zmq.__file__)
        try:
            native = _native.nccl_transport(
                host, advertise, ports, options.device, options.channels, options.communicators
            )
        except RuntimeError as error:
            raise TransportError(f"cannot start the nccl transport: {error}") from error
        super().__init__(native)

    @classmethod
    def create(cls, settings: TransportSettings) -> NcclTransport:
        return cls(
            settings.host,
            advertise=settings.advertise,
            ports=settings.ports,
            options=settings.options_of(cls.name, NcclOptions),
        )

    @classmethod
    def untried(cls, settings: TransportSettings) -> str | None:
        """Two ends in one process are two ranks on one GPU, which NCCL has to be allowed, and was never before 2.30."""
        if missing_library(settings.options_of(cls.name, NcclOptions).library) is not None:
            return None  # `unavailable` says it
        _, version = _native.nccl_library()
        major, minor = (int(number) for number in version.split(".")[:2])
        if (major, minor) < _SEVERAL_RANKS:
            return f"NCCL {version} has one rank on a GPU, so that one process can't try it out; 2.30 has several"
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            return "one process can try it out if NCCL may have two ranks on a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1)"
        return None

    @classmethod
    def remarks(cls, settings: TransportSettings) -> Iterator[Remark]:
        """Tell which libnccl is loaded, also where there is no GPU to use it with."""
        options = settings.options_of(cls.name, NcclOptions)
        if missing_library(options.library) is not None:
            return  # `unavailable` says it
        path, version = _native.nccl_library()
        yield Remark("NCCL", f"{version} from {path}; nodes that are to meet over it need the same version")

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        return missing(NcclOptions.parse(cls.name, options))
