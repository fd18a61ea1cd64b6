"""What p2pkv's transfer backend takes for granted of SGLang's ``disaggregation/common/conn.py``, in one place.

SGLang's scheduler relies on far more than the abstract interface of a transfer backend, so ours is made of the classes
that all of SGLang's own are made of. Where SGLang isn't installed ``object`` takes their place; then nothing here can
be used, but everything can be imported and its parts tested.
"""

from __future__ import annotations

import threading
from collections.abc import MutableMapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from p2pkv.integrations.sglang.installed import find
from p2pkv.integrations.sglang.pd.rows import Items, KVArgs
from p2pkv.integrations.sglang.pd.wire import Wanted

__all__ = [
    "CommonBootstrapServer",
    "CommonManager",
    "CommonReceiver",
    "CommonSender",
    "Poll",
    "device",
    "rank_index",
    "tcp_endpoint",
    "unsupported",
]


class Poll(IntEnum):
    """SGLang's ``KVPoll``: what its scheduler asks every request for."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


if TYPE_CHECKING:
    import zmq

    class PrefillInfo:
        """``PrefillServerInfo``."""

        attn_tp_size: int
        attn_cp_size: int
        pp_size: int

    class CommonManager:
        """``CommonKVManager``: one a rank, in SGLang's scheduler process."""

        kv_args: KVArgs
        is_mla_backend: bool
        is_dummy_cp_rank: bool
        local_ip: str
        rank_port: int
        server_socket: zmq.Socket[bytes]
        request_status: MutableMapping[int, int]
        transfer_infos: MutableMapping[int, dict[str, Wanted]]
        req_to_decode_prefix_len: MutableMapping[int, int]
        required_prefill_response_num_table: MutableMapping[int, int]
        prefill_info_table: MutableMapping[str, PrefillInfo]
        connection_pool: MutableMapping[str, list[dict[str, Any]]]
        connection_lock: threading.Lock
        waiting_timeout: float
        attn_tp_size: int
        attn_tp_rank: int
        attn_cp_size: int
        pp_size: int
        pp_rank: int
        dcp_size: int
        kv_shard_size: int

        def __init__(self, args: KVArgs, mode: object, server_args: object, is_mla: bool | None) -> None: ...
        def update_status(self, bootstrap_room: int, status: int) -> None: ...
        def record_failure(self, bootstrap_room: int, failure_reason: str) -> None: ...
        def resolve_kv_replica_factor(self, transfer_infos: dict[str, Wanted]) -> None: ...
        def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool: ...
        def parse_kv_status_message(self, msg: list[bytes]) -> tuple[int, int, int, str | None] | None: ...
        def send_kv_status_message(
            self,
            *,
            targets: list[tuple[str, int]],
            bootstrap_room: int,
            status: int,
            failure_reason: str | None = None,
        ) -> None: ...

    class CommonSender:
        """``CommonKVSender``: one a request, at prefill."""

        kv_mgr: Any
        bootstrap_room: int
        num_kv_indices: int
        conclude_state: int | None

        def __init__(self, mgr: Any, addr: str, room: int, has_dp_rank: bool = False) -> None: ...
        def _poll_with_status(self, check_status: object) -> int: ...
        def clear(self) -> None: ...
        def abort(self) -> None: ...
        def failure_exception(self) -> None: ...

    class CommonReceiver:
        """``CommonKVReceiver``: one a request, at decode."""

        kv_mgr: Any
        bootstrap_room: int
        bootstrap_addr: str
        bootstrap_infos: list[dict[str, Any]] | None
        prefill_info: PrefillInfo
        conclude_state: int | None
        init_time: float | None

        def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None: ...
        def init(self, prefill_dp_rank: int) -> None: ...
        def send_metadata(
            self,
            kv_indices: Items,
            aux_index: int | None = None,
            state_indices: Sequence[object] | None = None,
            decode_prefix_len: int | None = None,
            **destination: object,
        ) -> None: ...
        def poll(self) -> int: ...
        def clear(self) -> None: ...
        def abort(self) -> None: ...
        def failure_exception(self) -> None: ...
        def ensure_abort_notified(self, *, force_arm: bool = False) -> None: ...
        @classmethod
        def disconnect_endpoint(cls, endpoint: str) -> None: ...

    class CommonBootstrapServer:
        """``CommonKVBootstrapServer``: one a prefill server; tells decode where the ranks are."""

else:
    _CONN = "sglang.srt.disaggregation.common.conn"
    CommonManager = find(_CONN, "CommonKVManager") or object
    CommonSender = find(_CONN, "CommonKVSender") or object
    CommonReceiver = find(_CONN, "CommonKVReceiver") or object
    CommonBootstrapServer = find(_CONN, "CommonKVBootstrapServer") or object


def device() -> str:
    """Return the kind of device this scheduler's KV is on."""
    return str(_context("get_device").device)


def rank_index(tp_rank: int, dp_rank: int, pp_rank: int) -> int:
    """Return the number of this scheduler process among those of its server."""
    parallel = _context("get_parallel")
    return (int(dp_rank) * int(parallel.pp_size) + int(pp_rank)) * int(parallel.tp_size) + int(tp_rank)


def tcp_endpoint(host: str, port: int) -> str:
    """Return SGLang's key of a connection."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _context(name: str) -> Any:
    read = find("sglang.srt.runtime_context", name)
    assert read is not None, "a transfer backend runs within SGLang only"
    return read()


def unsupported(manager: CommonManager, *, is_prefill: bool) -> str | None:
    """Say which way of splitting a model over ranks is on that this backend can't transfer, or None."""
    for name, size in (
        ("pipeline parallelism of decode", 1 if is_prefill else manager.pp_size),
        ("attention context parallelism", manager.attn_cp_size),
        ("decode context parallelism", manager.dcp_size),
        ("KV cache sharding", manager.kv_shard_size),
    ):
        if size > 1:
            return f"p2pkv's transfer backend does not do {name} (size {size})"
    return None
