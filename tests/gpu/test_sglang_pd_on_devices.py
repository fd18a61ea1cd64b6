"""SGLang's transfers with KV in device memory and metadata in host memory, as SGLang has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda
from p2pkv.integrations.sglang.pd.rooms import Progress
from p2pkv.testing.ports import free_port
from sglang_servers import SETTLE_S, Servers

Allocate = Callable[[int], DeviceBuffer]


@pytest.fixture
def open_servers(cuda_settings: dict[str, Any], allocate: Allocate) -> Iterator[Callable[..., Servers]]:
    opened: list[Servers] = []

    def open_servers(*, p: bool = True, d: bool = True) -> Servers:
        staging = {"device_staging_size": "2MiB", "buffer_size": 0}  # an eighth of a request
        opened.append(
            Servers(
                f"127.0.0.1:{free_port()}",
                p=allocate if p else None,
                d=allocate if d else None,
                **cuda_settings,
                **staging,
            )
        )
        return opened[-1]

    yield open_servers
    for servers in opened:
        servers.close()


@pytest.mark.parametrize(("p", "d"), [(True, True), (True, False), (False, True)])
def test_a_request_arrives_byte_for_byte_with_its_metadata(
    open_servers: Callable[..., Servers], p: bool, d: bool
) -> None:
    servers = open_servers(p=p, d=d)
    kv = np.random.default_rng(1).integers(0, 256, servers.p.kv.shape, np.uint8)
    servers.p.aux[1] = 7
    if servers.p.device is None:
        servers.p.kv[:] = kv
    else:
        servers.p.device.write(kv.reshape(-1))
    room, incoming = servers.ask()
    servers.send(room)
    eventually(lambda: incoming.progress() is not Progress.PENDING, SETTLE_S)
    assert incoming.progress() is Progress.DONE, incoming.failure
    there = servers.d.kv if servers.d.device is None else servers.d.device.read().reshape(kv.shape)
    assert (there == kv).all()
    assert (servers.d.aux[0] == 7).all()
    eventually(lambda: servers.prefill.progress(room)[0] is Progress.DONE, SETTLE_S)


def test_a_device_that_fails_fails_the_request_in_words(
    emulated: FakeCuda, open_servers: Callable[..., Servers]
) -> None:
    servers = open_servers(p=False)
    for call in ("cuMemcpyHtoDAsync", "cuMemcpyBatchAsync"):
        emulated.fail(call, 2, stays=True)
    room, incoming = servers.ask()
    servers.send(room)
    eventually(lambda: incoming.progress() is Progress.FAILED, SETTLE_S)
    assert "could not be copied from or to their device" in str(incoming.failure)
    eventually(lambda: servers.prefill.progress(room)[0] is Progress.FAILED, SETTLE_S)
