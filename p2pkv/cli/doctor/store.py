"""Whether the store that ``membership`` names can be used, and what it has of this cluster."""

from __future__ import annotations

from collections.abc import Iterator

from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.outsider import Outsider
from p2pkv.config import Config
from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.registry.look import Sight, look, try_to_write
from p2pkv.errors import ControlError, RegistryError
from p2pkv.store_url import StoreUrl

_WAIT_S = 2.0
_SHOWN = 3


def examine_store(config: Config, store: StoreUrl, keys: ClusterKeys | None) -> Iterator[Finding]:
    """Read the records and try to write one; without ``keys``, as where no secret is made yet, say so."""
    what = store.where
    if keys is None:
        yield Finding(
            Verdict.NOTE, what, "no secret is there to read records with", "give it the cluster's secret_file"
        )
        return
    try:
        sight = look(store, keys, config.cluster, _WAIT_S)
        try_to_write(store, config.cluster, config.node_id, _WAIT_S)
    except RegistryError as error:
        yield Finding(Verdict.BAD, what, str(error), "no node starts until it answers")
        return
    yield Finding(
        Verdict.GOOD,
        what,
        f"can be read and written; {len(sight.members)} nodes of this cluster have records there",
    )
    yield from _refused(what, sight)
    yield from _twin(config, sight, keys)


def _refused(what: str, sight: Sight) -> Iterator[Finding]:
    for name, reason in list(sight.refused.items())[:_SHOWN]:
        says = f"the record of {name!r} ({len(sight.refused)} such in all) is refused: {reason}"
        verdict = Verdict.NOTE if sight.members else Verdict.BAD
        yield Finding(verdict, what, says, "delete it with etcdctl if no node of yours wrote it")


def _twin(config: Config, sight: Sight, keys: ClusterKeys) -> Iterator[Finding]:
    for member in sight.members:
        if member.node_id != config.node_id:
            continue
        try:
            with Outsider(keys) as outsider:
                report, _ = outsider.members([member.address], _WAIT_S)
        except ControlError:
            return  # it is gone, and its record goes with its lease
        if report.sender != member.node_id:
            return
        says = f"a live node at {member.address} has node_id {config.node_id!r}"
        yield Finding(Verdict.BAD, "node_id", says, "stop it, or choose another node_id")
