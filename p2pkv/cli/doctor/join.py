"""Whether a node would find its cluster: each join address is asked, as a stranger and as a member would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2pkv.address import can_listen_on, leads_to_loopback, split_address
from p2pkv.cli.doctor.addresses import Place
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.outsider import Outsider
from p2pkv.config import Config
from p2pkv.control.host_names import Names
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.silence import why_silent
from p2pkv.directory.view import State
from p2pkv.errors import ControlError

_WAIT_S = 2.0
_ITSELF = "the node of these settings answers there itself, and knows no other"


def examine_join(config: Config, keys: ClusterKeys | None, held: Place | None) -> Iterator[Finding]:
    """Ask every join address; without ``keys``, as where no secret is made yet, as a stranger only.

    ``held``: who has ``listen``, which may be the node of these settings, running.

    One that does not answer is ``BAD`` if no other does: the node would be alone.
    """
    addresses = config.join_addresses
    if not addresses:
        yield Finding(
            Verdict.GOOD, "join", "none is set: a cluster of this node alone, which others may join"
        )
        return
    names = Names()
    names.wait_for(addresses, _WAIT_S)
    findings = [_ask(config, address, keys, held, names.numbers(address)) for address in addresses]
    is_alone = all(finding.verdict is not Verdict.GOOD or finding.says == _ITSELF for finding in findings)
    for finding in findings:
        if finding.verdict is Verdict.NOTE and is_alone:
            advice = f"{finding.advice}: a node would be alone, and all that others have a miss"
            finding = Finding(Verdict.BAD, finding.what, finding.says, advice)
        yield finding


def _ask(
    config: Config, address: str, keys: ClusterKeys | None, held: Place | None, numbers: Sequence[str]
) -> Finding:
    what = f"join {address}"
    if not numbers:
        return Finding(Verdict.NOTE, what, "this host name can't be looked up", "mend the name, or DNS")
    if any(_can_be_taken(config, number) for number in numbers):
        return Finding(
            Verdict.GOOD, what, "nobody is there yet: a node here would take this address, and be the first"
        )
    if keys is None:
        return Finding(Verdict.NOTE, what, _as_a_stranger(address), "give it the cluster's secret_file")
    with Outsider(keys) as outsider:
        try:
            report, _ = outsider.members([address], _WAIT_S)
        except ControlError as error:
            return Finding(
                Verdict.NOTE, what, str(error), "start a node there, or give this one its secret_file"
            )
    if report.cluster != config.cluster:
        return Finding(
            Verdict.BAD,
            what,
            f"is a node of cluster {report.cluster!r}, not {config.cluster!r}",
            "set cluster",
        )
    there = [member for member in report.members if member.is_present]
    twins = [member for member in there if member.node_id == config.node_id and member.state is State.ALIVE]
    if twins and (held is None or not held.is_of(config) or twins[0].address != held.address):
        says = f"a live node at {twins[0].address} has node_id {config.node_id!r}"
        return Finding(Verdict.BAD, what, says, "stop it, or choose another node_id")
    if held is not None and held.is_of(config) and [member.node_id for member in there] == [config.node_id]:
        return Finding(Verdict.GOOD, what, _ITSELF)
    return Finding(Verdict.GOOD, what, f"{report.sender} answers, and knows {len(there)} nodes")


def _can_be_taken(config: Config, number: str) -> bool:
    host, _ = split_address("listen", config.listen)
    return can_listen_on(number) and (leads_to_loopback(f"{host}:0") or not leads_to_loopback(number))


def _as_a_stranger(address: str) -> str:
    return f"no private secret is there to ask with; {why_silent(address)}"
