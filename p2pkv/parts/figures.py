"""Figures of a node as a whole, which none of its parts has: what it is, whom it sees, over what its bytes go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from p2pkv.config import Config
from p2pkv.directory.view import State, View
from p2pkv.transports.base import Transport


def meeting_places(config: Config) -> str:
    """Return where others are looked for, as messages name it."""
    store = config.store
    found_there = [] if store is None else [f"the addresses found in {store.where}"]
    return ", ".join([*config.join_addresses, *found_there])


class Figures:
    """Thread-safe; the metrics ask at each scrape."""

    def __init__(
        self, config: Config, view: Callable[[], View], transports: Sequence[Transport], started: float
    ) -> None:
        """``started`` is the time of day at which the node did."""
        self._view = view
        self._transports = transports
        self._started = started
        self._named = (config.node_id, config.cluster, config.namespace)

    @cached_property
    def _build_info(self) -> dict[str, dict[tuple[str, ...], float]]:
        # The version is read from files, which no scrape but the first should do, and no start.
        from importlib.metadata import version

        return {"p2pkv_build_info": {(version("p2pkv"), *self._named): 1.0}}

    def build_info(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return what says which version of p2pkv this is, of which node."""
        return self._build_info

    def of_membership(self, *, is_alone: bool) -> dict[str, float]:
        """Return how many members are seen."""
        present = self._view().present()
        return {
            "p2pkv_members": len(present),
            "p2pkv_suspects": sum(member.state is State.SUSPECT for member in present),
            "p2pkv_start_time_seconds": self._started,
            "p2pkv_alone": is_alone,
        }

    def forged(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return how many connections of each transport were ended for what had been changed on the way."""
        return {
            "p2pkv_forged_records_total": {
                (transport.name,): transport.n_forged() for transport in self._transports
            }
        }

    def rails(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return what went over each rail of each transport, and what failed there."""
        nbytes: dict[tuple[str, ...], float] = {}
        retried: dict[tuple[str, ...], float] = {}
        failures: dict[tuple[str, ...], float] = {}
        for transport in self._transports:
            for number, rail in enumerate(transport.rail_totals()):
                labels = (transport.name, str(number))
                nbytes[labels] = rail.nbytes
                retried[labels] = rail.retried_nbytes
                failures |= {(*labels, reason): n for reason, n in rail.failures.items()}
        return {
            "p2pkv_rail_bytes_total": nbytes,
            "p2pkv_rail_retried_bytes_total": retried,
            "p2pkv_rail_failures_total": failures,
        }
