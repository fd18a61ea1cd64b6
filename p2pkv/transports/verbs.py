"""RDMA: InfiniBand, RoCE v2 and Soft-RoCE, by reliable queue pairs of libibverbs.

Only arguments and errors are looked at here; promises are kept in ``native/src/transports/verbs*``. The library is
loaded at run time: where it or the devices are missing, everything but this transport works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from p2pkv import _native
from p2pkv.errors import TransportError
from p2pkv.transports import gpudirect
from p2pkv.transports.base import Remark, TransportSettings
from p2pkv.transports.locked_memory import locked_memory_limit
from p2pkv.transports.native import NativeTransport
from p2pkv.transports.options import UNSET, TransportOptions, former

MIN_LOCKED_MEMORY = 64 << 20
"""Below this limit no pool of a useful size can be registered: the usual default, 8 MiB or less, is too low."""
MAX_RAILS = 8
"""How many ports one transport uses at most."""
_RAISE_LIMIT = (
    "raise RLIMIT_MEMLOCK (ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)"
)


@dataclass(frozen=True, slots=True)
class VerbsOptions(TransportOptions):
    devices: tuple[str, ...] = former((), "verbs_devices")
    """The RDMA devices to use, each ``NAME[:PORT][=ADDRESS]``; none named: every usable one."""
    library: str = _native.VERBS_LIBRARY
    """The libibverbs to load: a path, or a name that the loader knows."""
    gpudirect: bool = False
    """Register memory of CUDA devices, so that rows of transfers go from device to device; see ``p2pkv doctor``."""


class VerbsTransport(NativeTransport):
    """One-sided reads by RDMA devices, striped over all of them.

    ``devices`` names those to use, each ``NAME[:PORT][=ADDRESS]``; none means every usable one. Memory is locked from
    its registration until that is closed. With ``gpudirect`` memory of CUDA devices can be registered too; it is tried
    out then, for which its first and last 64 bytes must be left alone.
    """

    name = "verbs"
    options_class = VerbsOptions
    locks_memory = True

    def __init__(
        self,
        devices: Sequence[str] = (),
        *,
        library: str = _native.VERBS_LIBRARY,
        gpudirect: bool = False,
    ) -> None:
        try:
            super().__init__(_native.verbs_transport(list(devices), library, gpudirect))
        except RuntimeError as error:
            raise TransportError(f"cannot start the verbs transport: {error}") from error

    @classmethod
    def create(cls, settings: TransportSettings) -> VerbsTransport:
        options = settings.options_of(cls.name, VerbsOptions)
        transport = cls(options.devices, library=options.library, gpudirect=options.gpudirect)
        # the kernel counts memory once for every rail that it is registered on
        needed = settings.registered_nbytes * transport._n_rails(options)
        limit = locked_memory_limit()
        if limit is not None and needed > limit:
            transport.close()
            raise TransportError(
                f"cannot lock the pool and the receive buffer, {needed >> 10} KiB on all rails together: this process "
                f"may lock {limit >> 10} KiB; shrink pool_size and buffer_size, or {_RAISE_LIMIT}"
            )
        return transport

    def _n_rails(self, options: VerbsOptions) -> int:
        link = "RoCE v2" if self.domain == "verbs:roce" else "InfiniBand"
        usable = [port for port in ports(options.library) if not port.missing and port.link == link]
        return min(len(options.devices) or len(usable), MAX_RAILS)

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        try:
            found = ports(VerbsOptions.parse(cls.name, options).library)
        except TransportError as error:
            return str(error)
        if all(port.missing for port in found):
            return "; ".join(f"{port.device} port {port.port}: {port.missing}" for port in found)
        limit = locked_memory_limit()
        if limit is not None and limit < MIN_LOCKED_MEMORY:
            return f"RDMA needs locked memory, and this process may lock {limit >> 10} KiB; {_RAISE_LIMIT}"
        return None

    @classmethod
    def remarks(cls, settings: TransportSettings) -> Iterator[Remark]:
        """Tell of every port of every RDMA device, and whether they reach the memory of a GPU."""
        try:
            found = ports(settings.options_of(cls.name, VerbsOptions).library)
        except TransportError:
            return  # `unavailable` says it
        for port in found:
            node = "unknown" if port.numa_node < 0 else str(port.numa_node)
            yield Remark(
                f"{port.device} port {port.port}",
                f"{port.link}, {port.state}, address {port.gid or 'none'}, MTU {port.mtu}, NUMA node {node}",
                f"not used: {port.missing}" if port.missing else "",
            )
        yield from cls._gpudirect(settings.options_of(cls.name, VerbsOptions))

    @classmethod
    def _gpudirect(cls, options: VerbsOptions) -> Iterator[Remark]:
        """Try it out where there is a GPU, whether a node is told to use it or not."""
        try:
            _, devices = _native.cuda_driver()
            if not devices:
                return
            transport = cls(options.devices, library=options.library, gpudirect=True)
        except (RuntimeError, TransportError):
            return  # it is said of the GPU, or of this transport
        try:
            for what, by_descriptor in gpudirect.KINDS:
                yield gpudirect.try_out(transport, what, by_descriptor=by_descriptor, is_on=options.gpudirect)
        finally:
            transport.close()


def ports(library: str = _native.VERBS_LIBRARY) -> Sequence[_native.VerbsPort]:
    """Return every port of every RDMA device that this libibverbs knows, usable or not; at least one.

    Raises :class:`~p2pkv.errors.TransportError`, saying what is missing, where there are none.
    """
    try:
        return _native.verbs_ports(library)
    except RuntimeError as error:
        raise TransportError(str(error)) from error
