"""What is read again while the router runs: a file that has changed, within a second, and at SIGHUP all of them.

A file that can't be used changes nothing: what it said before stays in force, whole, and the log, the metrics and the
page say so. Requests under way keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from p2pkv.errors import ConfigError
from p2pkv_proxy.api_keys import ApiKeys, read_engines_key
from p2pkv_proxy.listing import read_file
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings_file import read_settings
from p2pkv_proxy.tls import Certificate, read_authorities

_log = logging.getLogger(__name__)
_LOOK_S = 0.4
"""Between two looks; what is the same at two of them is no longer being written."""
_MOST_TEXT = 300
_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


class _File:
    """A file, or several that belong together, and what a plan becomes by it."""

    def __init__(self, name: str, paths: tuple[Path, ...], read: Callable[[Plan], Plan]) -> None:
        """``read`` raises :class:`ConfigError`."""
        self.name = name
        self.paths = paths
        self.read = read
        self.seen: _Stamp | None = None
        self.taken: _Stamp | None = None
        """As it was when it was last read."""
        self.is_refused = False
        """What it says now is not in force."""

    @property
    def stamp(self) -> _Stamp:
        """Something that is different when a file has changed."""
        return tuple(map(_stamp, self.paths))

    @property
    def where(self) -> str:
        return " and ".join(map(str, self.paths))


def _files(plan: Plan) -> list[_File]:
    files, found = plan.files, []
    if (settings := files.settings) is not None:
        found.append(_File("settings", (settings,), lambda p: read_settings(settings, p)))
    if (instances := files.instances) is not None:
        found.append(
            _File("instances", (instances,), lambda p: replace(p, file_instances=tuple(read_file(instances))))
        )
    if (keys := files.api_keys) is not None:
        found.append(_File("api_keys", (keys,), lambda p: replace(p, api_keys=ApiKeys.read(keys))))
    if (chain := files.tls_cert) is not None and (key := files.tls_key) is not None:
        read = Certificate.read
        found.append(_File("certificate", (chain, key), lambda p: replace(p, certificate=read(chain, key))))
    if (authorities := files.engines_ca) is not None:
        found.append(
            _File(
                "engines_ca", (authorities,), lambda p: replace(p, engines_ca=read_authorities(authorities))
            )
        )
    if (engines_key := files.engines_key) is not None:
        found.append(
            _File(
                "engines_key", (engines_key,), lambda p: replace(p, engines_key=read_engines_key(engines_key))
            )
        )
    return found


def loaded(plan: Plan) -> Plan:
    """Return the plan with what is in its files. Raises :class:`ConfigError`."""
    for file in _files(plan):
        plan = file.read(plan)
    return plan


class Reloading:
    """The plan in force. One event loop uses it; nothing here waits but :meth:`follow`."""

    def __init__(
        self,
        plan: Plan,
        take: Callable[[Plan], None],
        note: Callable[[str, str, bool], None] = lambda name, what, is_taken: None,
    ) -> None:
        """``take`` puts another plan into force; it can't fail.

        ``note`` hears of each file that was read: which one, what became of it, and whether it was taken.
        """
        self.plan = plan
        self._take = take
        self._note = note
        self._files = _files(plan)

    @property
    def refused(self) -> list[str]:
        """Names of the files whose present content is not in force."""
        return [file.name for file in self._files if file.is_refused]

    @property
    def names(self) -> list[str]:
        """Names of all files that are read again."""
        return [file.name for file in self._files]

    async def follow(self) -> None:
        """Read again what has changed, for ever."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Read each file again that is another one than was read, unless it has changed since the last look."""
        for file in self._files:
            stamp = file.stamp
            is_settled, file.seen = stamp == file.seen, stamp
            if is_settled and stamp != file.taken:
                self._read(file, stamp)

    def read_all(self) -> None:
        """Read all files again, as an operator says who knows that they are written."""
        for file in self._files:
            self._read(file, file.stamp)
        if not self._files:
            _log.warning(
                "there is nothing to read again: instances, keys, certificates and settings came by options"
            )
        elif not self.refused:
            _log.info("all files were read again: %s", ", ".join(self.names))

    def _read(self, file: _File, stamp: _Stamp) -> None:
        file.seen = file.taken = stamp  # of before: what changes while it is read is read once more
        try:
            plan = file.read(self.plan)
        except ConfigError as error:
            file.is_refused = True
            _log.warning("%s; what it said before stays in force", error)
            self._note(file.name, f"it can't be used: {error}"[:_MOST_TEXT], False)
            return
        file.is_refused = False
        is_new, self.plan = plan != self.plan, plan
        if is_new:
            self._take(plan)
            _log.info("the %s in %s are in force", file.name, file.where)
            self._note(file.name, "read again, and in force", True)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
