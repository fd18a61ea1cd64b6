"""What a worker tells the driver: one JSON object a line, in a file that outlives the worker.

Times are of ``time.monotonic()``, which all processes of a machine share. A line about something that is
about to happen is written before it happens, so whoever reads a consequence can read its cause. Kinds (``k``):

| k | written | fields |
|---|---|---|
| ``up`` | when the node is a member | ``t``, ``boot``, ``s`` seconds it took, ``off`` seconds its wall clock is off |
| ``publish>`` | before | ``t``, ``j`` page numbers, ``v`` versions |
| ``publish`` | after | ``b``, ``e`` and ``w``: begin, end, seconds waited for a processor; ``j`` and ``h`` outcomes |
| ``take>`` | before a retract or clear | ``t``, ``j`` (null: all) |
| ``take`` | after | ``b``, ``e``, ``w``, ``j`` |
| ``fetch`` | after | ``b``, ``e``, ``w``, ``o`` owner, ``j``, ``v`` versions that came (null: a miss) |
| ``call`` | after any other call | ``b``, ``e``, ``w``, ``what``, ``n``, ``h`` hits |
| ``gave`` | when a row's status is final | ``req``, ``s`` serial, ``rows`` that the producer was told are not OK |
| ``got`` | after a get or receive | ``req``, ``rows``: row and serial of each that was OK |
| ``late`` | when a timer of 10 ms came late | ``b``, ``e`` |
| ``tick`` | four times a second | ``t``: every lateness until then has been written |
| ``hot`` | after a hot page is published, before it is taken back | ``add`` or ``drop``: page numbers |
| ``broken`` | at once | ``what`` |
| ``hushed`` | when an engine publishes nothing until it may again | ``id`` |
| ``bump`` | after | ``b``, ``e``, ``w``, ``id``, ``unreached`` members, or what it raised |
| ``forget`` | when an engine takes nothing for published any more | ``t`` |
| ``drained`` | when a host's node has handed over its pages | ``t``, ``n`` pages, ``h`` handed over, ``a`` adopted |
| ``refused`` | when a process could not start, and will try again | ``why`` |
| ``looked`` | answer to ``look`` | ``id``, ``found``: owner -> page numbers |
| ``ended`` | after close | ``b``, ``e`` |
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]


class Journal:
    """The writer's side; any thread may write. A line is one ``write``, so that a kill never leaves half of two."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, kind: str, **fields: object) -> None:
        """Append one record; it is in the file when this returns."""
        os.write(self._descriptor, (json.dumps({"k": kind, **fields}) + "\n").encode())


class JournalReader:
    """The driver's side: reads what has been added since it was asked last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Record]:
        """Return the complete records that are new."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [json.loads(line) for line in data[:end].splitlines()]
