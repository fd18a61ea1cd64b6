"""The trial of GPUDirect: network cards read device memory of this process into other device memory of it.

That they register it proves nothing: there are machines where that succeeds and the cards then read something else. So
``p2pkv doctor`` has every byte compared before it says that a node may be told to use it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import numpy as np

from p2pkv import _native
from p2pkv.errors import TransportError
from p2pkv.transports.base import Remark, Status, Transport

KINDS = (("memory of cudaMalloc", False), ("memory of cuMemCreate (expandable_segments)", True))
"""What cards are tried out with, and whether it goes to other processes by a descriptor."""
_NBYTES = 2 << 20
_PIECE = 65536
_LEFT = 512
"""Bytes at the end of each piece that are not read, and must be left as they are."""
_WAIT_S = 5.0
_ADVICE = (
    "dmabufs need the open kernel modules of NVIDIA's driver (R515), Linux 5.12 and rdma-core 34; without them load "
    "nvidia-peermem (modprobe nvidia-peermem)"
)
_OTHER_BYTES = "have PCIe's access control (ACS) and the IOMMU let devices reach each other, or turn them off"


def try_out(transport: Transport, what: str, *, by_descriptor: bool, is_on: bool) -> Remark:
    """Say whether ``transport`` brings such memory of the first device right; ``is_on``: a node is told to use it."""
    try:
        device = _native.CudaDevice.open(0)
        read_devices_from_itself(transport, device, by_descriptor=by_descriptor)
    except (RuntimeError, TransportError) as error:
        staged = "a node stages rows of it" if is_on else "leave it off, as it is"
        reason = _OTHER_BYTES if "other bytes" in str(error) else _ADVICE
        return Remark("GPUDirect", f"{what}: {error}", f"{staged}; {reason}")
    says = f"RDMA devices have read {_NBYTES >> 20} MiB of {what} into other memory of the GPU, and all of it right"
    unused = (
        ""
        if is_on
        else "; a node does not use it: the option gpudirect, on both ends, has rows of transfers go so"
    )
    return Remark("GPUDirect", says + unused)


def read_devices_from_itself(
    transport: Transport, device: _native.CudaDevice, *, by_descriptor: bool
) -> None:
    """Read pieces of device memory through ``transport`` into other device memory, and compare every byte.

    Raises :class:`~p2pkv.errors.TransportError`, or RuntimeError of the driver, saying what was not to be had.
    """
    given, expected = os.urandom(_NBYTES), bytearray(os.urandom(_NBYTES))
    with ExitStack() as undo:
        source, target = (_native.CudaMemory.allocate(device, _NBYTES, by_descriptor) for _ in range(2))
        source.write(given)
        target.write(bytes(expected))
        region = transport.register_memory(source, source.address, _NBYTES, readable=True)
        undo.callback(region.close)
        local = transport.register_memory(target, target.address, _NBYTES, readable=False)
        undo.callback(local.close)
        endpoint = transport.open()
        undo.callback(endpoint.close)
        endpoint.bind(transport.accept(endpoint.describe()))
        at = np.arange(0, _NBYTES, _PIECE, dtype=np.int64)
        spans = np.stack([at, at[::-1], np.full_like(at, _PIECE - _LEFT)], axis=1)
        statuses = endpoint.read(local, endpoint.attach(region.describe()), spans, words=None).wait(_WAIT_S)
        if (statuses != Status.OK).any():
            names = ", ".join(sorted({Status(status).name for status in statuses.tolist()}))
            raise TransportError(f"reads of device memory of this machine itself ended as {names}")
        found = target.read()
    for to, start, nbytes in spans.tolist():
        expected[to : to + nbytes] = given[start : start + nbytes]
    if found != expected:
        raise TransportError("RDMA devices have brought other bytes than are in the memory")
