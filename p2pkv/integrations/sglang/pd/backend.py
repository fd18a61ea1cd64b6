"""SGLang's prefill and decode servers hand KV over through p2pkv: ``--disaggregation-transfer-backend p2pkv``.

Where SGLang's own backends write into decode's memory, here decode reads: it grants the pages of a request, prefill
offers what it has computed, and decode's node pulls. Bytes are proven before they count, nobody writes into anybody's
memory, and either side gives up a request alone. ``docs/sglang.md`` has the command lines. Each scheduler process has a
node of its own; native threads move the bytes, whatever SGLang's scheduler does meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.errors import ConfigError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.sglang.heartbeat import announce_server
from p2pkv.integrations.sglang.installed import kv_heads, served_model
from p2pkv.integrations.sglang.pd.common import (
    CommonBootstrapServer,
    CommonManager,
    Poll,
    device,
    rank_index,
    unsupported,
)
from p2pkv.integrations.sglang.pd.decode import DecodeSide, P2PKVReceiver
from p2pkv.integrations.sglang.pd.heads import Split
from p2pkv.integrations.sglang.pd.prefill import Chunk, P2PKVSender, PrefillSide
from p2pkv.integrations.sglang.pd.rows import Items, KVArgs, RequestRows, memories
from p2pkv.integrations.sglang.pd.settings import pd_config, require_known_memory
from p2pkv.integrations.sglang.pd.stages import Place
from p2pkv.node import Node

__all__ = ["P2PKVBootstrapServer", "P2PKVManager", "P2PKVReceiver", "P2PKVSender"]


class P2PKVManager(CommonManager):
    """What a rank of a prefill or decode server has for all its requests; ``node`` is its node.

    No exception of p2pkv's reaches SGLang's scheduler once it has started: a request fails instead, with the reason in
    SGLang's log and answer.
    """

    kv_status_msg_tag = b"P2PKV-PD-1-status"
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: object,
        server_args: object,
        is_mla_backend: bool | None = False,
    ) -> None:
        """Start the node and join its cluster; errors of the configuration are raised here: SGLang does not start."""
        require_known_memory(device())
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        is_prefill = getattr(disaggregation_mode, "value", None) == "prefill"
        problem = unsupported(self, is_prefill=is_prefill)
        if problem is not None:
            raise ConfigError(problem)
        index = rank_index(
            getattr(args, "engine_rank", 0), getattr(args, "system_dp_rank", 0) or 0, self.pp_rank
        )
        config = pd_config(self.local_ip, self.rank_port, index=index)
        self.node = Node.start(config)
        self._memories = [
            self.node.register_address(address, nbytes, readable=is_prefill)
            for address, nbytes in memories(args)
        ]
        self.boundary = Boundary("SGLang's transfers", self.node.metrics)
        rows = RequestRows.of(args, served_model())
        split = Split.of(
            args, self.attn_tp_size, self.attn_tp_rank, is_mla=self.is_mla_backend, n_heads=kv_heads()
        )
        self.side: PrefillSide | DecodeSide
        if is_prefill:
            place = Place(self.pp_rank, self.pp_size, getattr(args, "prefill_start_layer", 0) or 0)
            self.side = PrefillSide(self, rows, self.boundary, self.node.transfers, split, place)
        else:
            grant = self.node.transfers.grant
            self.side = DecodeSide(self, rows, self.boundary, grant, self._members, split)
        announce_server(config, index, self.node)

    def _members(self) -> dict[str, int]:
        return {member.node_id: member.boot_epoch for member in self.node.members()}

    # --- prefill

    @guarded("send", miss=None)
    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Items,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Sequence[object] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: object = None,
        indices_event: object = None,
        trace_ctx: object = None,
    ) -> None:
        """Have some pages of a request offered to decode; returns at once."""
        if self.request_status.get(bootstrap_room) in (None, Poll.FAILED):
            return
        chunk = Chunk(
            pages=kv_indices,
            first_page=index_slice.start,
            is_last=is_last_chunk,
            slot=aux_index,
            states=state_indices,
            ready=tuple(event for event in (indices_event, wait_event) if event is not None),
        )
        side = self.side
        assert isinstance(side, PrefillSide)
        side.send(bootstrap_room, chunk)

    # --- decode

    @guarded("find", miss=False)
    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Say whether it is known how a prefill server is laid out; if not, ask it behind the scheduler's back.

        SGLang's own waits for up to 5 s, in which a stopped prefill server would stop decode for everybody.
        """
        if bootstrap_addr in self.prefill_info_table:
            return True
        side = self.side
        assert isinstance(side, DecodeSide)
        look = super().try_ensure_parallel_info
        return side.find(bootstrap_addr, look)

    def unequal(self, bootstrap_addr: str) -> str | None:
        """Say why the requests of a prefill server can't come here, or None."""
        info = self.prefill_info_table.get(bootstrap_addr)
        if info is None:
            return None  # SGLang says so itself
        if info.attn_cp_size != 1:
            return "p2pkv's transfer backend does no context parallelism, and prefill does"
        side = self.side
        assert isinstance(side, DecodeSide)
        return side.unequal(info)

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices: Items,
        aux_index: int | None,
        state_indices: Sequence[object] | None,
        decode_prefix_len: int | None,
        is_dummy: bool,
        device_kv_indices: Items | None = None,
    ) -> list[bytes]:
        """Return what to tell a prefill rank of a request."""
        side = self.side
        assert isinstance(side, DecodeSide)
        return side.wanted(
            bootstrap_room,
            kv_indices,
            state_indices,
            decode_prefix_len or 0,
            required_dst_info_num,
            is_dummy=is_dummy,
        )

    def teardown(self) -> None:
        """End all transfers and leave the cluster. Idempotent."""
        self.side.stop()
        self.node.close()


class P2PKVBootstrapServer(CommonBootstrapServer):
    """Tells decode servers where the ranks of this prefill server are; SGLang's own, unchanged."""
