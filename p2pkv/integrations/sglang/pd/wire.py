"""What a decode server tells a prefill server beyond SGLang's own messages, over SGLang's sockets.

These sockets are not secured: whoever reaches them can send anything. So no message carries an address or a key that
would let its sender read or write memory; it names a node, and only nodes that know the cluster's secret move bytes.
"""

from __future__ import annotations

import msgspec

from p2pkv.integrations.sglang.pd.heads import Split
from p2pkv.integrations.sglang.pd.rows import Shape

TAG = b"P2PKV-PD-3"
"""Frame 0 of every message; another version of the format has another number."""
_MAX_FRAME = 1 << 20


class Wanted(msgspec.Struct, frozen=True):
    """A request of which decode has the pages ready: its grant exists, whoever is named may be put to."""

    room: int
    name: str
    """Of the transfer; new for each attempt, so that nothing late can be taken for it."""
    node_id: str
    """The decode rank's node."""
    host: str
    port: int
    """Where the decode rank hears of failures."""
    n_pages: int
    n_states: tuple[int, ...]
    """Items of each component."""
    decode_prefix_len: int
    """Tokens that decode has already; only the pages behind them are wanted."""
    n_peers: int
    """Decode ranks that want something of this prefill rank."""
    is_dummy: bool
    """This prefill rank is to send nothing: another one has the same bytes."""
    shape: Shape
    split: Split = Split()
    layers: tuple[int, ...] = ()
    """How many layers each of prefill's stages has, as decode counts them; empty where it has one stage."""

    @property
    def required_dst_info_num(self) -> int:
        """SGLang's name for :attr:`n_peers`; its own code reads it."""
        return self.n_peers

    @property
    def endpoint(self) -> str:
        """SGLang's name for :attr:`host`."""
        return self.host

    @property
    def dst_port(self) -> int:
        """SGLang's name for :attr:`port`."""
        return self.port


_decoder = msgspec.msgpack.Decoder(Wanted)
_encoder = msgspec.msgpack.Encoder()


def pack(wanted: Wanted) -> list[bytes]:
    """Return the frames of a message."""
    return [TAG, _encoder.encode(wanted)]


def unpack(frames: list[bytes]) -> Wanted | None:
    """Return what a message says, or None if it is none of ours. Raises :class:`ValueError` if it is malformed."""
    if not frames or frames[0] != TAG:
        return None
    if len(frames) != 2 or len(frames[1]) > _MAX_FRAME:
        raise ValueError(f"{len(frames)} frames, or one too long")
    wanted = _decoder.decode(frames[1])  # msgspec's errors are ValueErrors
    counts = (wanted.n_pages, *wanted.n_states, wanted.n_peers - 1, *(n - 1 for n in wanted.layers))
    if min(counts) < 0:
        raise ValueError(f"impossible counts in {wanted}")
    return wanted


def unpack_abort(frames: list[bytes]) -> int | None:
    """Return the room of SGLang's own message that decode gives a request up, or None if it is another one.

    Raises :class:`ValueError` if it is malformed.
    """
    if len(frames) < 2 or frames[0] != b"ABORT":
        return None
    return int(frames[1].decode("ascii"))


def node_id(host: str, port: int) -> str:
    """Return the id of the node that a rank runs, from the address at which SGLang's messages reach it.

    So each server knows the other's node from what SGLang's bootstrap tells it.
    """
    return f"sglang-{host}:{port}"
