"""What the instances are that somebody has told this node of: in memory, bounded, gone with the node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from p2pkv.directory.view import node_key
from p2pkv.indexer.keying import PageIds, Prefixed
from p2pkv.indexer.refusal import Refusal, bad, not_found
from p2pkv.indexer.requests import Register, Unregister
from p2pkv.page import Namespace

MAX_REGISTRATIONS = 1024


@dataclass(frozen=True, slots=True)
class Registration:
    """One rank of an instance."""

    tenant: str
    instance_id: str
    dp_rank: int
    model: str
    lora_name: str
    block_size: int
    salt: str
    kind: str
    node_ids: tuple[str, ...]
    node_keys: tuple[int, ...]
    naming: tuple[object, ...]
    """Those with equal ones call their pages alike: one look-up is for all of them."""
    keying: PageIds | Prefixed


class Registrations:
    """Thread-safe. ``by_rank`` has at most :data:`MAX_REGISTRATIONS`, guarded by ``_lock``."""

    def __init__(self, namespace: Callable[[str], Namespace]) -> None:
        """``namespace`` makes one by its name."""
        self._namespace = namespace
        self._lock = threading.Lock()
        self._by_rank: dict[tuple[str, str, int], Registration] = {}

    def register(self, told: Register) -> Registration:
        """Keep an instance; what was known of the same rank of it before is replaced."""
        made = self._made(told)
        key = (made.tenant, made.instance_id, made.dp_rank)
        with self._lock:
            if key not in self._by_rank and len(self._by_rank) >= MAX_REGISTRATIONS:
                raise Refusal(
                    HTTPStatus.INSUFFICIENT_STORAGE,
                    f"{MAX_REGISTRATIONS} ranks are registered here, which is all there may be; unregister some",
                )
            self._by_rank[key] = made
        return made

    def unregister(self, told: Unregister) -> list[Registration]:
        """Forget an instance, or one rank of it; return what was forgotten."""
        tenant, instance, model = told.tenant, str(told.instance_id), told.named
        with self._lock:
            gone = [
                each
                for each in self._by_rank.values()
                if (each.tenant, each.instance_id, each.model) == (tenant, instance, model)
                and told.dp_rank in (None, each.dp_rank)
            ]
            for each in gone:
                del self._by_rank[each.tenant, each.instance_id, each.dp_rank]
        if not gone:
            raise not_found(
                f"no such rank of instance {instance!r} is registered here for tenant {tenant!r} and model {model!r}"
            )
        return gone

    def of(self, tenant: str, model: str, lora_name: str) -> list[Registration]:
        """Return those that a question of this scope is about."""
        with self._lock:
            return [
                each
                for each in self._by_rank.values()
                if (each.tenant, each.model, each.lora_name) == (tenant, model, lora_name)
            ]

    def all(self) -> list[Registration]:
        """Return everything that is registered."""
        with self._lock:
            return list(self._by_rank.values())

    def _made(self, told: Register) -> Registration:
        instance = str(told.instance_id)
        node_ids = tuple(told.node_ids or [instance])
        naming = _naming(told)
        keying: PageIds | Prefixed = PageIds()
        if told.namespace is not None:
            namespace = self._namespace(told.namespace)
            if told.key_prefixes_hex is not None:
                keying = Prefixed(namespace, told.type, raw=_from_hex(told.key_prefixes_hex))
            else:
                keying = Prefixed(namespace, told.type, texts=told.key_prefixes or [""])
        return Registration(
            tenant=told.tenant,
            instance_id=instance,
            dp_rank=told.dp_rank or 0,
            model=told.named,
            lora_name=told.lora_name or "",
            block_size=told.block_size,
            salt=told.additional_salt or told.additionalsalt or "",
            kind=told.type,
            node_ids=node_ids,
            node_keys=tuple(node_key(node_id) for node_id in node_ids),
            naming=naming,
            keying=keying,
        )


def _naming(told: Register) -> tuple[object, ...]:
    texts, raws = told.key_prefixes, told.key_prefixes_hex
    if texts is not None and raws is not None:
        raise bad(
            "prefixes of keys are given as text in `key_prefixes` or as bytes in `key_prefixes_hex`, not both"
        )
    if told.namespace is None and (texts is not None or raws is not None):
        raise bad(
            "prefixes of keys say nothing without the `namespace` that keys are hashed in: give it as well"
        )
    return (told.namespace, tuple(texts or ()), tuple(raws or ()))


def _from_hex(texts: list[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(text) for text in texts]
    except ValueError:
        raise bad("`key_prefixes_hex` must be hexadecimal digits, two a byte") from None
