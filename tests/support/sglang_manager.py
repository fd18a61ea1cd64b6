"""What p2pkv's transfer backend relies on of SGLang's manager, without SGLang: rooms, their status, and messages."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import zmq

from p2pkv.integrations.sglang.pd.common import Poll
from p2pkv.integrations.sglang.pd.rows import KVArgs


class Manager:
    """One rank's. ``update_status`` keeps SGLang's rules: a failed room stays so, only an opening status makes one."""

    def __init__(self, args: KVArgs, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.kv_args = args
        self.is_mla_backend = False
        self.local_ip = "127.0.0.1"
        self.server_socket = context.socket(zmq.PULL)
        self.rank_port = self.server_socket.bind_to_random_port("tcp://127.0.0.1")
        self.waiting_timeout = 30.0
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, dict[str, Any]] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.failure_records: dict[int, str] = {}
        self.connection_lock = threading.Lock()
        self.connection_pool: dict[str, list[dict[str, Any]]] = {}
        self.prefill_info_table: dict[str, Any] = {}
        self.told: dict[int, list[str | None]] = defaultdict(list)
        """What the other side was told of a room's failure."""

    def update_status(self, bootstrap_room: int, status: int) -> None:
        current = self.request_status.get(bootstrap_room)
        if current is None:
            if status in (Poll.BOOTSTRAPPING, Poll.WAITING_FOR_INPUT):
                self.request_status[bootstrap_room] = status
        elif status == Poll.FAILED:
            self.request_status[bootstrap_room] = status
        elif current != Poll.FAILED:
            self.request_status[bootstrap_room] = max(current, status)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        self.failure_records[bootstrap_room] = failure_reason

    def resolve_kv_replica_factor(self, transfer_infos: dict[str, Any]) -> None:
        pass

    def parse_kv_status_message(self, msg: list[bytes]) -> None:
        return None

    def send_kv_status_message(
        self,
        *,
        targets: list[tuple[str, int]],
        bootstrap_room: int,
        status: int,
        failure_reason: str | None = None,
    ) -> None:
        self.told[bootstrap_room].append(failure_reason)

    def close(self) -> None:
        """Close its socket."""
        self.server_socket.close(linger=0)
