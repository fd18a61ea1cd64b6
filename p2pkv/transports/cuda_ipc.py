"""The transport between processes of one host that map each other's device memory (CUDA IPC).

Rows of transfers go from device to device, with no copy in host memory; pages, and all else that lies in host memory,
go as over ``shm``. Whoever maps memory of cudaMalloc may write to it, so it is never chosen by itself. The promises are
kept in ``native/src/transports/cuda_ipc``.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pkv import _native
from p2pkv.errors import TransportError
from p2pkv.transports.native import NativeTransport, ShmTransport
from p2pkv.transports.options import UNSET


class CudaIpcTransport(NativeTransport):
    """Processes of one host and user map each other's device memory, and each other's sealed memory as over shm."""

    name = "cuda_ipc"

    def __init__(self) -> None:
        try:
            super().__init__(_native.cuda_ipc_transport())
        except RuntimeError as error:
            raise TransportError(f"cannot start the cuda_ipc transport: {error}") from error

    def refusal(self) -> str:
        why = _native.cuda_ipc_refusal() or super().refusal()
        instances = ", ".join(filter(None, _native.cuda_mig_instances()))
        return (
            f"{why}; {instances} is an instance of a GPU, and CUDA IPC leads to no other"
            if instances
            else why
        )

    @classmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        if (reason := ShmTransport.unavailable()) is not None:
            return reason
        if reason := _native.cuda_ipc_missing():
            return f"no CUDA driver can be used: {reason}"
        return None
