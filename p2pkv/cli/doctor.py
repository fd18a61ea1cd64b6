"""``p2pkv doctor``: can this machine run a node, over what, and what should be changed."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path

import typer
import zmq
from rich.console import Console
from rich.text import Text

from p2pkv import _native, transports
from p2pkv.address import is_loopback, split_address
from p2pkv.cli.doctor_ucx import examine_ucx
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.config import Config
from p2pkv.errors import ConfigError, P2PKVError
from p2pkv.secret import MIN_SECRET_BYTES, cluster_keys, private_secret_path
from p2pkv.transports import verbs

GIB = 1 << 30


class Verdict(Enum):
    """What a finding means for a node here: its mark and color."""

    GOOD = ("ok  ", "green")
    NOTE = ("note", "yellow")
    BAD = ("BAD ", "red")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line; ``advice`` says what to do, where something could be done."""

    verdict: Verdict
    what: str
    says: str
    advice: str = ""


def doctor(config: ConfigFile = None, settings: Settings = None) -> None:
    """Say what works here, what doesn't, and what to do about it. Exit status 1 if no node could run."""
    findings = list(examine(load(config, settings)))
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark, color = finding.verdict.value
        line = Text(mark, style=color).append(
            f"  {finding.what:{width}}  {finding.says}", style="not bold default"
        )
        console.print(line.append(f"  -> {finding.advice}" if finding.advice else "", style=color))
    if any(finding.verdict is Verdict.BAD for finding in findings):
        raise typer.Exit(1)


def examine(config: Config) -> Iterator[Finding]:
    """Look at everything a node needs; ``BAD`` is what keeps it from running."""
    yield from _versions()
    yield from _machine()
    yield from _memory(config)
    yield from _transports(config)
    yield _secret(config)
    yield _listen(config)


def _versions() -> Iterator[Finding]:
    yield Finding(Verdict.GOOD, "p2pkv", f"{version('p2pkv')} on Python {platform.python_version()}")
    yield Finding(
        Verdict.GOOD,
        "libraries",
        f"numpy {version('numpy')}, pyzmq {version('pyzmq')}, libzmq {zmq.zmq_version()}",
    )
    if zmq.has("curve"):
        yield Finding(Verdict.GOOD, "CURVE", "libzmq encrypts and authenticates")
    else:
        yield Finding(
            Verdict.BAD, "CURVE", "this libzmq was built without it", "install pyzmq from PyPI's wheels"
        )


def _machine() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    advice = "an engine beside p2pkv's threads wants 2 or more" if usable < 2 else ""
    yield Finding(
        Verdict.GOOD if usable >= 2 else Verdict.NOTE, "cores", f"{usable} of {os.cpu_count()} usable", advice
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 4096
    yield Finding(
        Verdict.NOTE if few else Verdict.GOOD,
        "open files",
        _limit(soft, ""),
        "raise it (ulimit -n 65536) for clusters of hundreds of nodes" if few else "",
    )


def _memory(config: Config) -> Iterator[Finding]:
    available = _available_memory()
    too_large = available is not None and config.pool_nbytes > available
    yield Finding(
        Verdict.BAD if too_large else Verdict.GOOD,
        "memory",
        f"{_size(available)} available, the pool takes {_size(config.pool_nbytes)}",
        "lower pool_size" if too_large else "",
    )
    yield _memfd()
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        yield Finding(
            Verdict.GOOD,
            "/dev/shm",
            f"{_size(usage.free)} of {_size(usage.total)} free; pools are memfds, which it does not limit",
        )
    yield _locked_memory(config)
    yield _huge_pages()


def _locked_memory(config: Config) -> Finding:
    """Shm and tcp lock no memory; verbs locks the pool and whatever is registered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    says = f"{_limit(soft, ' bytes')} (hard {_limit(hard, ' bytes')})"
    limit = verbs.locked_memory_limit()
    is_enough = limit is None or limit >= config.pool_nbytes
    if limit is None and soft != resource.RLIM_INFINITY:
        says += ", but this process may lock any amount (CAP_IPC_LOCK)"
    if is_enough or "verbs" not in _wanted(config):
        return Finding(Verdict.GOOD, "locked memory", f"{says}; only verbs locks any")
    return Finding(
        Verdict.BAD,
        "locked memory",
        f"{says}; verbs locks the pool of {_size(config.pool_nbytes)} and all registered memory",
        "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), lower pool_size, or leave verbs out of transports",
    )


def _memfd() -> Finding:
    try:
        _native.SharedRegion.create(os.sysconf("SC_PAGESIZE"))
    except OSError as error:
        return Finding(Verdict.BAD, "memfd", str(error), "let the container use memfd_create and F_ADD_SEALS")
    return Finding(Verdict.GOOD, "memfd", "shared memory can be made and sealed")


def _huge_pages() -> Finding:
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        chosen = path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding(Verdict.NOTE, "huge pages", "the kernel does not say", "")
    if chosen in ("never", "deny"):
        return Finding(
            Verdict.NOTE,
            "huge pages",
            f"shared memory has none (shmem_enabled is {chosen})",
            f"root may `echo advise > {path}`",
        )
    return Finding(Verdict.GOOD, "huge pages", f"shmem_enabled is {chosen}")


def _transports(config: Config) -> Iterator[Finding]:
    for name, missing in transports.available().items():
        yield Finding(
            Verdict.GOOD if missing is None else Verdict.NOTE, f"transport {name}", missing or "can run here"
        )
    yield from _rails(config)
    if (ucx := examine_ucx(config)) is not None:
        yield Finding(Verdict.GOOD if ucx.is_good else Verdict.NOTE, "UCX", ucx.says, ucx.advice)
    try:
        chosen = transports.wanted(_setting(config))
    except P2PKVError as error:
        yield Finding(Verdict.BAD, "transports", str(error), "change the setting 'transports'")
        return
    if chosen:
        yield Finding(Verdict.GOOD, "transports", f"a node uses {', then '.join(chosen)}")
    else:
        yield Finding(Verdict.BAD, "transports", "none can run here", "see the lines above")


def _rails(config: Config) -> Iterator[Finding]:
    """Every port of every RDMA device, and whether the setting ``verbs_devices`` can be had."""
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
    if config.verbs_devices and "verbs" in _wanted(config):
        try:
            verbs.VerbsTransport(config.verbs_devices).close()
        except P2PKVError as error:
            yield Finding(Verdict.BAD, "verbs_devices", str(error), "change the setting 'verbs_devices'")


def _setting(config: Config) -> str | tuple[str, ...]:
    return "auto" if config.transport_names == ("auto",) else config.transport_names


def _wanted(config: Config) -> list[str]:
    try:
        return transports.wanted(_setting(config))
    except P2PKVError:
        return []  # said of the setting


def _secret(config: Config) -> Finding:
    if config.secret_file is None:
        path = private_secret_path()
        if not path.exists():
            return Finding(
                Verdict.GOOD,
                "secret",
                f"none is set; a private one will be made at {path}, for this user's nodes here",
            )
    else:
        path = Path(config.secret_file)
    try:
        cluster_keys(str(path))
    except ConfigError as error:
        return Finding(Verdict.BAD, "secret", str(error), _secret_advice(path))
    kind = (
        "private secret, for this user's nodes on this machine"
        if config.secret_file is None
        else "secret_file"
    )
    return Finding(Verdict.GOOD, "secret", f"{path} ({kind})")


def _secret_advice(path: Path) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return f"make it: (umask 077; head -c 32 /dev/urandom | base64 > {path}), the same on every node"
    return f"chmod 600 {path}" if mode & 0o077 else f"put at least {MIN_SECRET_BYTES} random bytes into it"


def _listen(config: Config) -> Finding:
    host, port = split_address("listen", config.listen)
    where = f"{config.listen}{' (any free port)' if port == 0 else ''}"
    if is_loopback(host):
        advice = (
            ""
            if config.secret_file is None
            else "other machines can't reach it: set listen to a network address"
        )
        return Finding(
            Verdict.NOTE if advice else Verdict.GOOD, "listen", f"{where}: this machine only", advice
        )
    return Finding(
        Verdict.GOOD, "listen", f"{where}: reachable from other machines, for those with the secret"
    )


def _available_memory() -> int | None:
    """Return what the kernel or the container's limit leaves, whichever is less."""
    left = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            left.append(int(limit) - int((group / "memory.current").read_text()))
    except OSError:
        pass  # no such limit, or a kernel that does not show it
    return min(left, default=None)


def _size(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{nbytes / GIB:.1f} GiB"


def _limit(value: int, unit: str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}{unit}"
