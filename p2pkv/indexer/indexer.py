"""Questions and their answers, whoever carries them.

Nothing is kept of where pages lie: each question asks the directory, so that an answer is as true as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from p2pkv.directory.view import Member
from p2pkv.indexer.answers import Held, as_conductor, as_dynamo
from p2pkv.indexer.keying import PageIds
from p2pkv.indexer.matches import Look, Places, locate
from p2pkv.indexer.refusal import bad, not_found, unanswerable
from p2pkv.indexer.registrations import Registration, Registrations
from p2pkv.indexer.requests import MAX_HASHES, Query, QueryByHash, Register, Unregister, read
from p2pkv.page import Namespace

LOOK_S = 0.15
"""Below the 200 ms that known clients wait for an answer."""
MAX_KEYS = 1 << 16
"""Pages looked up for one question, over all ways in which the instances in question call them."""


class Indexer:
    """Thread-safe; every method takes a body and raises :class:`~p2pkv.indexer.refusal.Refusal`."""

    def __init__(
        self, look: Look, namespace: Callable[[str], Namespace], members: Callable[[], Iterable[Member]]
    ) -> None:
        self._look = look
        self._members = members
        self._registrations = Registrations(namespace)

    def register(self, body: bytes) -> dict[str, object]:
        """Keep what an instance is."""
        made = self._registrations.register(read(body, Register))
        return {"status": "registered successfully", "instance_id": made.instance_id}

    def unregister(self, body: bytes) -> dict[str, object]:
        """Forget an instance."""
        gone = self._registrations.unregister(read(body, Unregister))
        names = [f"{each.instance_id}|{each.tenant}|{each.dp_rank}" for each in gone]
        return {"status": "unregistered successfully", "removed_instances": names}

    def workers(self) -> list[dict[str, object]]:
        """Return what is registered."""
        return [
            {
                "instance_id": each.instance_id,
                "tenant_id": each.tenant,
                "dp_rank": each.dp_rank,
                "model": each.model,
                "lora_name": each.lora_name,
                "block_size": each.block_size,
                "type": each.kind,
                "node_ids": each.node_ids,
            }
            for each in self._registrations.all()
        ]

    def query(self, body: bytes) -> dict[str, object]:
        """Say who has how much of a prompt's tokens."""
        asked = read(body, Query)
        if asked.lora_name or asked.cache_salt:
            raise unanswerable(
                "what blocks are called that were computed with an adapter or a salt is known to their engine alone; "
                "ask /query_by_hash with its own hashes"
            )
        meant = self._meant(asked)
        if not meant:
            raise not_found(_unregistered(asked, "tokens can be asked for of a registered model only"))
        for each in meant:
            if each.salt:
                raise unanswerable(
                    f"instance {each.instance_id!r} is registered with the salt {each.salt!r}, and what blocks are "
                    "called with it is known to its engine alone; ask /query_by_hash"
                )
        hashes: dict[int, list[str]] = {}
        for each in meant:
            named = each.keying.hashes_of(asked.token_ids, each.block_size)  # refuses for some
            if len(named) > MAX_HASHES:
                raise bad(f"a prompt of {len(named)} blocks; at most {MAX_HASHES} are looked up")
            hashes.setdefault(each.block_size, named)
        return self._answer(asked, meant, lambda each: hashes[each.block_size])

    def query_by_hash(self, body: bytes) -> dict[str, object]:
        """Say who has how much of a prompt, whose blocks are named."""
        asked = read(body, QueryByHash)
        hashes = asked.hashes
        meant = self._meant(asked)
        if meant:
            return self._answer(asked, meant, lambda _: hashes)
        return self._answer_with_nodes(asked, hashes)

    def _meant(self, asked: Query | QueryByHash) -> list[Registration]:
        """Return who is asked about; nobody if nobody is registered for the tenant and the model."""
        scope = self._registrations.of(asked.tenant, asked.named, asked.lora_name or "")
        meant = [each for each in scope if asked.block_size in (None, each.block_size)]
        if scope and not meant:
            sizes = ", ".join(str(size) for size in sorted({each.block_size for each in scope}))
            raise not_found(
                f"model {asked.named!r} has no instance here with blocks of {asked.block_size} tokens, only of {sizes}"
            )
        if asked.instance_id is not None and scope:
            meant = [each for each in meant if each.instance_id == str(asked.instance_id)]
            if not meant:
                raise not_found(
                    f"no instance {asked.instance_id!r} is registered here for that model and tenant"
                )
        return meant

    def _answer(
        self,
        asked: Query | QueryByHash,
        meant: Sequence[Registration],
        hashes_of: Callable[[Registration], list[str]],
    ) -> dict[str, object]:
        """Look up once for all that call their pages alike."""
        ways = {(each.naming, each.block_size): each for each in meant}
        n_keys = sum(len(hashes_of(each)) * each.keying.n_parts for each in ways.values())
        if n_keys > MAX_KEYS:
            raise bad(
                f"{n_keys} pages would have to be looked up for all instances of this model, and {MAX_KEYS} are at "
                "most; ask about one instance (`instance_id`), or about fewer blocks"
            )
        places = {
            way: locate(self._look, each.keying.keys(hashes_of(each)), each.keying.n_parts, LOOK_S)
            for way, each in ways.items()
        }
        held: dict[str, Held] = {}
        for each in meant:
            match = places[each.naming, each.block_size].match(each.node_keys)
            held.setdefault(each.instance_id, Held()).add(each.dp_rank, match, each.block_size)
        return self._in_form(asked, held)

    def _answer_with_nodes(self, asked: QueryByHash, hashes: list[str]) -> dict[str, object]:
        """Take hashes for page ids, which need no registration, and nodes for instances."""
        if asked.block_size is None:
            raise not_found(
                _unregistered(asked, "without a registration `block_size` is needed, and hashes are page ids")
            )
        members = {member.node_id: member.key for member in self._members()}
        if asked.instance_id is not None:
            name = str(asked.instance_id)
            if name not in members:
                raise not_found(_unregistered(asked, f"no node is called {name!r} either"))
            members = {name: members[name]}
        ids = PageIds()
        places: Places = locate(self._look, ids.keys(hashes), ids.n_parts, LOOK_S)
        held: dict[str, Held] = {}
        for node_id, key in sorted(members.items()):
            held.setdefault(node_id, Held()).add(0, places.match([key]), asked.block_size)
        return self._in_form(asked, held)

    @staticmethod
    def _in_form(asked: Query | QueryByHash, held: dict[str, Held]) -> dict[str, object]:
        return as_dynamo(held) if asked.is_dynamos else as_conductor(asked.tenant, held)


def _unregistered(asked: Query | QueryByHash, what: str) -> str:
    adapter = f" and adapter {asked.lora_name!r}" if asked.lora_name else ""
    return (
        f"no instance is registered at this node for tenant {asked.tenant!r} and model {asked.named!r}{adapter}; {what}"
        ". POST /register says what an instance is, to each node that is asked"
    )
