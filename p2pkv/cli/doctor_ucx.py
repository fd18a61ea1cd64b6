"""What ``p2pkv doctor`` says of UCX: which libucp is loaded, and what it can use for this node's address."""

from __future__ import annotations

from dataclasses import dataclass

from p2pkv import _native
from p2pkv.address import split_address
from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.transports.ucx import UcxTransport, use_library


@dataclass(frozen=True, slots=True)
class UcxReport:
    """One line; ``advice`` says what to do, where something could be done."""

    is_good: bool
    says: str
    advice: str = ""


def examine_ucx(config: Config) -> UcxReport | None:
    """Load UCX and ask it; None where it can't be loaded, which ``UcxTransport.unavailable`` has said."""
    try:
        use_library(config.ucx_library)
    except ConfigError as error:
        return UcxReport(False, str(error), "change the setting 'ucx_library'")
    if UcxTransport.unavailable() is not None:
        return None
    path, version = _native.ucx_library()
    host, _ = split_address("listen", config.listen)
    try:
        resources = _native.ucx_resources(host, bool(config.ucx_trust_network))
    except RuntimeError as error:
        return UcxReport(False, f"{version} from {path}: {error}", _advice(path))
    return UcxReport(True, f"{version} from {path}, over {', '.join(resources)}")


def _advice(path: str) -> str:
    if "libucx" in path:
        return "the wheel has no RDMA: install the system's UCX, or OFED's"
    return "`ucx_info -d` lists what UCX finds; another address of this machine may have an RDMA device"
