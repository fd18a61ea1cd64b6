"""A prefill and a decode server, and what a router does in front of them."""

from __future__ import annotations

import random
import threading
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_server import SGLangServer, lasting_port

from demo.xpyd.real_engines import Recipe, SGLang

MAX_ROOM = 2**63 - 1
FAILURES = (
    "p2pkv_failed_calls_total",
    "p2pkv_failed_rows_total",
    "p2pkv_rejected_rows_total",
    "p2pkv_duplicate_rows_total",
    "p2pkv_expired_rows_total",
    "p2pkv_lapsed_offers_total",
    "p2pkv_withdrawn_offers_total",
)


class Refused(Exception):
    """The decode server gave an error instead of an answer; ``args[0]`` says which."""


class Pair:
    """A prefill and a decode server on this machine. Prefill can be started again at the same place.

    Both announce themselves to ``router``, if there is one. ``ranks``: tensor parallel sizes of prefill and decode;
    ``stages``: of prefill's pipeline.
    """

    def __init__(
        self, folder: Path, router: str = "", ranks: tuple[int, int] = (1, 1), stages: int = 1
    ) -> None:
        self._folder = folder
        self._prefill_ranks = ranks[0], stages
        self._announced = {"P2PKV_ROUTERS": router} if router else {}
        self._join = f"127.0.0.1:{lasting_port()}"
        self._port, self.bootstrap_port, self._n_starts = lasting_port(), lasting_port(), 0
        self.start_prefill()
        self.decode = self._start("decode", SGLang.DECODE, lasting_port(), (ranks[1], 1))

    def start_prefill(self) -> None:
        """Start the prefill server."""
        self._n_starts += 1
        self.prefill = self._start(
            f"prefill-{self._n_starts}", SGLang.PREFILL, self._port, self._prefill_ranks
        )

    def _start(self, name: str, options: Sequence[str], port: int, ranks: tuple[int, int]) -> SGLangServer:
        metrics_port = lasting_port()
        split = SGLang.parallel(*ranks) if ranks != (1, 1) else Recipe(())
        return SGLangServer(
            self._folder / f"{name}.log",
            [*SGLang.paired(options, self.bootstrap_port), *split.command],
            environment=SGLang.node(self._join, metrics_port) | self._announced | dict(split.environment),
            port=port,
            metrics_port=metrics_port,
        )

    def generate(self, tokens: list[int], n_tokens: int = 16, *, timeout: float = 120.0) -> dict[str, Any]:
        """Send a request to both, as a router does; return decode's answer.

        Raises :class:`Refused`, and :class:`TimeoutError` if there is no answer in time.
        """
        place = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.randrange(1, MAX_ROOM),
        }
        threading.Thread(
            target=self._ask_prefill, args=(tokens, n_tokens, place, timeout), daemon=True
        ).start()
        try:
            return self.decode.generate(tokens, n_tokens, timeout=timeout, **place)
        except urllib.error.HTTPError as error:
            raise Refused(f"{error.code}: {error.read().decode(errors='replace')[:500]}") from error

    def _ask_prefill(
        self, tokens: list[int], n_tokens: int, place: dict[str, object], timeout: float
    ) -> None:
        try:
            self.prefill.generate(tokens, n_tokens, timeout=timeout, **place)
        except (OSError, urllib.error.URLError):
            pass  # what matters is what decode says

    def close(self) -> None:
        """End both. Idempotent."""
        for server in (self.prefill, self.decode):
            server.kill()


def failures(server: SGLangServer) -> dict[str, float]:
    """Return p2pkv's counters of what went wrong, other than 0."""
    return {name: n for name, n in server.counters().items() if n and name.startswith(FAILURES)}
