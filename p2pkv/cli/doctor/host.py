"""The doctor looks at what a node and its host's engines are to each other, who keeps its memory, and its tenants.

Nothing of it is needed where none of these settings is there. A node that runs already is no fault: a look at what its
successor would find, or its engines, is what the doctor is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from p2pkv import _native
from p2pkv.attach.auto import listening_path, look_for_node, nobody_listens, why_apart
from p2pkv.attach.host import EngineSocket
from p2pkv.cli.doctor.addresses import examine_tenants_addresses
from p2pkv.cli.doctor.disk import examine_disk
from p2pkv.cli.doctor.finding import Finding, Verdict, size
from p2pkv.config import AUTO, Config
from p2pkv.errors import ConfigError
from p2pkv.keeper.process import ProcessKeeper
from p2pkv.parts.tenants import plan_tenants

_VISIT_S = 2.0


def examine_host(config: Config) -> Iterator[Finding]:
    """Look at ``attach``, ``attach_listen``, ``keeper`` and ``tenants``, those that are set."""
    if config.attach:
        yield _attach(config)
    if config.attach_listen:
        yield _attach_listen(config, "attach_listen")
    if config.keeper:
        yield _keeper(config)
    if config.tenants:
        yield from _tenants(config)


def _attach(config: Config) -> Finding:
    advice = "start one there before its engines: p2pkv node with attach_listen"
    try:
        if config.attach == AUTO:
            path, refusals = look_for_node(config)
            if path is not None:
                return Finding(Verdict.GOOD, "attach", f"auto: attaches to the node at unix:{path}")
            says = f"auto: a node by itself, since {'; '.join(refusals) or nobody_listens()}"
            return Finding(Verdict.NOTE, "attach", says, "start the host's node first, if there is to be one")
        why = why_apart(config, Path(config.attach.removeprefix("unix:")))
    except ConfigError as error:
        return Finding(Verdict.BAD, "attach", str(error))
    if why is None:
        return Finding(Verdict.GOOD, "attach", f"the node at {config.attach} lets an engine in")
    return Finding(
        Verdict.BAD,
        "attach",
        f"{config.attach}: {why or 'no node listens there'}",
        "" if why else advice,
    )


def _attach_listen(config: Config, what: str) -> Finding:
    try:
        path = (
            listening_path(config)
            if config.attach_listen == AUTO
            else Path(config.attach_listen.removeprefix("unix:"))
        )
    except ConfigError as error:
        return Finding(Verdict.BAD, what, str(error))
    with suppress(RuntimeError):  # then nobody lets engines in there
        address, _, _ = _native.visit_attach_host(str(path), _VISIT_S)
        says = f"unix:{path}: the node at {address} listens there"
        return Finding(Verdict.NOTE, what, says, "a second one needs a path of its own")
    is_new = not path.parent.exists()
    try:
        EngineSocket(str(path)).close()
    except ConfigError as error:
        return Finding(Verdict.BAD, what, str(error))
    finally:
        if is_new:
            with suppress(OSError):
                path.parent.rmdir()
    return Finding(Verdict.GOOD, what, f"unix:{path}: engines of this user attach there")


def _keeper(config: Config) -> Finding:
    if config.keeper == "systemd":
        says = "systemd, which only the service itself can ask"
        n_fds = 2 * (bool(config.pool_nbytes) + len(config.tenants_by_name))
        advice = f"the unit needs NotifyAccess=main and FileDescriptorStoreMax={n_fds}"
        return Finding(Verdict.NOTE, "keeper", says, advice)
    try:
        ProcessKeeper(config.keeper.removeprefix("unix:"), "doctor").close()
    except ConfigError as error:
        return Finding(Verdict.BAD, "keeper", str(error))
    return Finding(Verdict.GOOD, "keeper", f"{config.keeper} answers")


def _tenants(config: Config) -> Iterator[Finding]:
    try:
        planned = plan_tenants(config)
    except ConfigError as error:
        yield Finding(Verdict.BAD, "tenants", str(error))
        return
    pools = sum(tenant.config.pool_nbytes for tenant in planned)
    names = ", ".join(tenant.name for tenant in planned)
    yield Finding(Verdict.GOOD, "tenants", f"{names}: each has a secret, and pools of {size(pools)} together")
    for tenant in planned:
        yield from examine_tenants_addresses(tenant.config, tenant.name, config)
        if tenant.config.disk_nbytes:
            yield examine_disk(tenant.config, f"disk tier of {tenant.name}")
        if tenant.config.attach_listen:
            yield _attach_listen(tenant.config, f"attach_listen of {tenant.name}")
