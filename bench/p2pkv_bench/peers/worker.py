"""The other process: the owner's side of one system, or one system by itself.

Its commands are those of :class:`p2pkv_bench.peer.Peer`.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

from p2pkv.testing.processes import claim_stdout, obey
from p2pkv_bench.peers import base
from p2pkv_bench.peers.filling import n_kept
from p2pkv_bench.working_set import Source


class Worker:
    """Its methods are the commands."""

    def __init__(self) -> None:
        self._owner: base.Owner | None = None

    def own(self, module: str, options: dict[str, Any], working_set: int) -> None:
        """Start the owner's side of a system, with ``working_set`` bytes of pages."""
        self._owner = import_module(f"p2pkv_bench.peers.{module}").Owner(Source(working_set), options)

    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        """Make pages of one size readable."""
        assert self._owner is not None
        return self._owner.publish(page_nbytes, n_pages)

    def start_ms(self, module: str, kind: str, options: dict[str, Any], nbytes: int) -> float:
        """Return the milliseconds that a system takes to start, its modules imported, and end it."""
        system: base.Registered = getattr(import_module(f"p2pkv_bench.peers.{module}"), kind)(options)
        with system:
            began = time.monotonic()
            system.start(nbytes)
            return (time.monotonic() - began) * 1e3

    def n_kept(self, module: str, options: dict[str, Any], pool_nbytes: int, page_nbytes: int) -> int:
        """Return how many pages a system's pool holds after more were stored than it has room for."""
        pool: base.Pool = import_module(f"p2pkv_bench.peers.{module}").Pool(options)
        with pool:
            pool.start(pool_nbytes)
            return n_kept(pool, pool_nbytes, page_nbytes)


def main() -> None:
    """Do what stdin says until it ends."""
    # what these libraries print must not come between the answers, and what they raise may be anything
    obey(Worker(), errors=(Exception,), answers=claim_stdout())
    os._exit(0)  # not every one of these systems ends its threads


if __name__ == "__main__":
    main()
