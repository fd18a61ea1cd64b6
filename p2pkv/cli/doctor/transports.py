"""The transports: which can run here, over what, and whether they bring the right bytes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from p2pkv import _native, transports
from p2pkv.address import split_address
from p2pkv.cli.doctor.finding import Finding, Verdict, limit, size
from p2pkv.cli.doctor.selftest import read_from_itself
from p2pkv.config import Config
from p2pkv.errors import ConfigError, P2PKVError
from p2pkv.memory.staging import use_library as use_cuda_library
from p2pkv.transports import ucx, verbs
from p2pkv.transports.base import TransportSettings
from p2pkv.transports.ucx import UcxOptions, UcxTransport

_WILDCARDS = ("0.0.0.0", "::", "*")


def examine_transports(config: Config) -> Iterator[Finding]:
    """Say of each transport what is missing, or try it out."""
    settings = _settings(config)
    for name, missing in transports.available(config.options).items():
        yield (
            _try_out(name, settings)
            if missing is None
            else Finding(Verdict.NOTE, f"transport {name}", missing)
        )
    yield from _options(config)
    yield from _rails(config)
    yield from _ucx(settings)
    yield _gpu(config)
    yield _locked_memory(config)
    yield from _chosen(config)


def _settings(config: Config) -> TransportSettings:
    host, _ = split_address("listen", config.listen)
    host = "127.0.0.1" if host in _WILDCARDS else host
    return TransportSettings(
        host=host,
        advertise=host,
        options=config.options,
    )


def _options(config: Config) -> Iterator[Finding]:
    """Say which options are in force, of every transport that has any."""
    for name in transports.names():
        try:
            in_force = str(transports.options_of(name, config.options.get(name, {})))
        except ConfigError:
            continue  # its package can't be loaded, which was said of it already
        if in_force:
            yield Finding(Verdict.GOOD, f"options of {name}", in_force)


def _try_out(name: str, settings: TransportSettings) -> Finding:
    what = f"transport {name}"
    try:
        (transport,) = transports.create([name], settings)
    except P2PKVError as error:
        return Finding(Verdict.NOTE, what, str(error))
    try:
        return Finding(Verdict.GOOD, what, read_from_itself(transport))
    except P2PKVError as error:
        return Finding(Verdict.BAD, what, str(error), f"leave {name} out of 'transports'")
    finally:
        transport.close()


def _chosen(config: Config) -> Iterator[Finding]:
    try:
        chosen = transports.wanted(_setting(config), config.options)
    except P2PKVError as error:
        yield Finding(Verdict.BAD, "transports", str(error), "change the setting 'transports'")
        return
    if chosen:
        yield Finding(Verdict.GOOD, "transports", f"a node uses {', then '.join(chosen)}")
    else:
        yield Finding(Verdict.BAD, "transports", "none can run here", "see the lines above")


def _ucx(settings: TransportSettings) -> Iterator[Finding]:
    """Say which libucp was loaded, and what it can use for this node's address."""
    options = settings.options_of(UcxTransport.name, UcxOptions)
    if ucx.missing(options.library) is not None:
        return  # said of the transport already
    path, version = _native.ucx_library()
    try:
        resources = _native.ucx_resources(settings.host, options.trust_network)
    except RuntimeError as error:
        advice = "`ucx_info -d` lists what UCX finds; another address of this machine may have an RDMA device"
        if "libucx" in path:
            advice = "the wheel has no RDMA: install the system's UCX, or OFED's"
        yield Finding(Verdict.NOTE, "UCX", f"{version} from {path}: {error}", advice)
        return
    yield Finding(Verdict.GOOD, "UCX", f"{version} from {path}, over {', '.join(resources)}")


def _gpu(config: Config) -> Finding:
    """Say which CUDA devices there are, and that pages reach them through host memory."""
    kernel = Path("/proc/driver/nvidia/version")
    try:
        use_cuda_library(config.cuda_library)
        version, devices = _native.cuda_driver()
    except (ConfigError, RuntimeError) as error:
        if config.cuda_library == "auto" and not kernel.exists():
            return Finding(Verdict.GOOD, "GPU", "no NVIDIA driver here; pages move between host memories")
        return Finding(Verdict.NOTE, "GPU", str(error), "without it no device memory can be registered")
    modules = Path("/proc/modules").read_text() if Path("/proc/modules").exists() else ""
    peer = "loaded" if "nvidia_peermem" in modules else "not loaded"
    staging = f"{config.device_staging_nbytes / 2**20:g} MiB"
    names = ", ".join(f"{i}: {name}" for i, name in enumerate(devices)) or "no device"
    return Finding(
        Verdict.GOOD if devices else Verdict.NOTE,
        "GPU",
        f"CUDA {version // 1000}.{version % 1000 // 10} ({names}); pages in device memory go through {staging} of "
        f"page-locked host memory, over every transport; nvidia_peermem is {peer}, and not used",
    )


def _locked_memory(config: Config) -> Finding:
    """Shm and tcp lock no memory; verbs locks the pool and whatever is registered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    says = f"{limit(soft, ' bytes')} (hard {limit(hard, ' bytes')})"
    lockable = verbs.locked_memory_limit()
    is_enough = lockable is None or lockable >= config.registered_nbytes
    if lockable is None and soft != resource.RLIM_INFINITY:
        says += ", but this process may lock any amount (CAP_IPC_LOCK)"
    if is_enough or "verbs" not in _wanted(config):
        return Finding(Verdict.GOOD, "locked memory", f"{says}; only verbs locks any")
    return Finding(
        Verdict.BAD,
        "locked memory",
        f"{says}; verbs locks the pool and the receive buffer, {size(config.registered_nbytes)} on every rail, "
        "and all registered memory",
        "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), lower pool_size and buffer_size, or leave verbs out of "
        "transports",
    )


def _rails(config: Config) -> Iterator[Finding]:
    """Every port of every RDMA device, and whether those that its options name can be had."""
    try:
        ports = verbs.ports()
    except P2PKVError:
        return  # said of the transport already
    for port in ports:
        node = "unknown" if port.numa_node < 0 else str(port.numa_node)
        yield Finding(
            Verdict.NOTE if port.missing else Verdict.GOOD,
            f"{port.device} port {port.port}",
            f"{port.link}, {port.state}, address {port.gid or 'none'}, MTU {port.mtu}, NUMA node {node}",
            f"not used: {port.missing}" if port.missing else "",
        )
    devices = _settings(config).options_of("verbs", verbs.VerbsOptions).devices
    if devices and "verbs" in _wanted(config):
        try:
            verbs.VerbsTransport(devices).close()
        except P2PKVError as error:
            yield Finding(Verdict.BAD, "devices of verbs", str(error), "change them in 'transport_options'")


def _setting(config: Config) -> str | tuple[str, ...]:
    return "auto" if config.transport_names == ("auto",) else config.transport_names


def _wanted(config: Config) -> list[str]:
    try:
        return transports.wanted(_setting(config), config.options)
    except P2PKVError:
        return []  # said of the setting
