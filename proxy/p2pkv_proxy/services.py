"""What every request needs, made once."""

from __future__ import annotations

from dataclasses import dataclass

from p2pkv_proxy.engines import Engines
from p2pkv_proxy.holdings import Holdings
from p2pkv_proxy.large_bodies import LargeBodies
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.relaying import Relay
from p2pkv_proxy.retry_budget import RetryBudget
from p2pkv_proxy.routing import Router
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.spans import Spans
from p2pkv_proxy.waiting_room import WaitingRoom


@dataclass(slots=True)
class Services:
    """What every request needs. A request keeps the settings that it has begun with; others may take their place."""

    settings: Settings
    router: Router
    engines: Engines
    metrics: Metrics
    holdings: Holdings
    relay: Relay
    retry_budget: RetryBudget
    waiting_room: WaitingRoom
    large_bodies: LargeBodies
    spans: Spans | None = None
    authorization: bytes | None = None
    """What engines are told instead of the client's key; b"": nothing. None: the client's key is theirs."""

    def take(self, settings: Settings) -> None:
        """Have other settings hold for requests that come from now on."""
        self.settings = self.router.settings = self.waiting_room.settings = settings
        self.engines.take(settings)
