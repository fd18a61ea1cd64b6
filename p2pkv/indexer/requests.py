"""The bodies of requests, as Mooncake's Conductor and Dynamo's indexer take them, and what p2pkv takes besides.

The two name some fields differently: ``model`` or ``modelname`` and ``seq_hashes`` are the Conductor's, ``model_name``
and ``block_hashes`` Dynamo's. Both are taken; a query that names its model as Dynamo does is answered as Dynamo
answers. What is not known is ignored, as both do.
"""

from __future__ import annotations

from typing import Annotated, TypeVar, cast

import msgspec
from msgspec import Meta

from p2pkv.indexer.refusal import bad
from p2pkv.message_types import worked_out

MAX_HASHES = 8192
"""Of one query: half a million tokens in blocks of 64, and the directory's largest question."""
MAX_TOKENS = 1 << 20
MAX_PARTS = 64
"""Pages that one block may consist of: a server's ranks, times its groups of layers."""
_MAX_BLOCK = 1 << 16
_BOUND = 256

_Name = Annotated[str, Meta(max_length=_BOUND)]
_Id = Annotated[str, Meta(min_length=1, max_length=_BOUND)] | Annotated[int, Meta(ge=0)]
_Block = Annotated[int, Meta(ge=1, le=_MAX_BLOCK)]
_Rank = Annotated[int, Meta(ge=0, le=_MAX_BLOCK)]
_Parts = Annotated[list[_Name], Meta(min_length=1, max_length=MAX_PARTS)]
_Hashes = Annotated[list[str | int], Meta(max_length=MAX_HASHES)]
_Tokens = Annotated[list[Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]], Meta(max_length=MAX_TOKENS)]


class _Scoped(msgspec.Struct, kw_only=True):
    """What every request says of the model."""

    model: _Name | None = None
    modelname: _Name | None = None
    model_name: _Name | None = None
    lora_name: _Name | None = None
    tenant_id: _Name | None = None

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.tenant_id if self.tenant_id is not None else "default"

    @property
    def named(self) -> str:
        """The model's name. Raises :class:`~p2pkv.indexer.refusal.Refusal` if it has none, or two."""
        names = {name for name in (self.model, self.modelname, self.model_name) if name}
        if len(names) != 1:
            raise bad(
                "the model is named by `model` (or `modelname`, `model_name`), once and not empty: "
                f"there are {len(names)} names"
            )
        return names.pop()


@worked_out
class Register(_Scoped, kw_only=True):
    """What an instance is: its blocks, its nodes, and how its pages are called."""

    instance_id: _Id
    block_size: _Block
    type: _Name = ""
    dp_rank: _Rank | None = None
    additionalsalt: _Name | None = None
    additional_salt: _Name | None = None
    endpoint: _Name | None = None
    replay_endpoint: _Name | None = None
    node_ids: _Parts | None = None
    namespace: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    key_prefixes: _Parts | None = None
    key_prefixes_hex: _Parts | None = None


@worked_out
class Unregister(_Scoped, kw_only=True):
    """Which instance is no more; without a rank, all of its ranks."""

    instance_id: _Id
    dp_rank: _Rank | None = None


class _Asking(_Scoped, kw_only=True):
    instance_id: _Id | None = None
    block_size: _Block | None = None
    cache_salt: _Name | None = None

    @property
    def is_dynamos(self) -> bool:
        """Whether who asks speaks as Dynamo's clients do."""
        return self.model_name is not None


@worked_out
class Query(_Asking, kw_only=True):
    """A question by tokens."""

    token_ids: _Tokens


@worked_out
class QueryByHash(_Asking, kw_only=True):
    """A question by the names of blocks, which each stand for all tokens before as well."""

    seq_hashes: _Hashes | None = None
    block_hashes: _Hashes | None = None
    block_hash: _Hashes | None = None

    @property
    def hashes(self) -> list[str]:
        """The names. Raises :class:`~p2pkv.indexer.refusal.Refusal` for numbers, and for none or two lists."""
        given = [each for each in (self.seq_hashes, self.block_hashes, self.block_hash) if each is not None]
        if len(given) != 1:
            raise bad(
                "the blocks are named by one list, `seq_hashes` (or `block_hashes`, `block_hash`); "
                f"there are {len(given)}"
            )
        kinds = list(map(type, given[0]))  # a thousand of them are looked at in one call
        if int in kinds:
            raise bad(
                f"hash {kinds.index(int)} is a number: 64 bits do not name a page, whose key is made of the whole "
                "hash; send hexadecimal digits (vLLM has whole hashes in its events with "
                "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)"
            )
        return cast("list[str]", given[0])


_Body = TypeVar("_Body", bound=_Scoped)


def read(body: bytes, kind: type[_Body]) -> _Body:
    """Return a request's body. Raises :class:`~p2pkv.indexer.refusal.Refusal` for what is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not what {kind.__name__.lower()} takes: {error}") from error
