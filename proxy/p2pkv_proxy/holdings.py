"""How much of a prompt p2pkv nodes already hold: what ``predicted`` and ``cache_aware`` weigh.

The names of a prompt's pages are computed where it is known how, or else those that an engine has said of a prompt that
began with the same text. The directory says who has them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from p2pkv.errors import ControlError, P2PKVError
from p2pkv.instances.page_report import read_report
from p2pkv.limited_log import LimitedLog
from p2pkv.page import Namespace
from p2pkv_proxy.held import Held, Place
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.named_pages import Known, NamedPages
from p2pkv_proxy.observer import DirectoryObserver
from p2pkv_proxy.page_keys import Keying
from p2pkv_proxy.prompts import BLOCK_BYTES, BLOCK_TOKENS, Prompt
from p2pkv_proxy.registry import Registry

_log = logging.getLogger(__name__)
_LOOK_UP_S = 0.02
"""An answer that takes longer is worth less than the time."""
_THREADS = 2
_MOST_WAITING = 32
_MOST_NAMESPACES = 256
"""Engines name them; more are no cluster's, and all are made anew."""
_MOST_TEMPLATE = 4096
"""Tokens that a prompt may have beyond one for each byte of its text, for templates and pictures."""


class Holdings:
    """Asks the directory, if there is one. Without an answer a prompt says why."""

    def __init__(self, registry: Registry, observer: DirectoryObserver | None, metrics: Metrics) -> None:
        self._registry = registry
        self._observer = observer
        self._metrics = metrics
        self._log = LimitedLog(_log)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="p2pkv-lookup")
        self._n_waiting = 0
        self._namespaces: dict[str, Namespace] = {}
        self.named = NamedPages()

    async def look_up(self, prompt: Prompt) -> None:
        """Fill in ``prompt.holdings``, or why they are not known."""
        if self._observer is None:
            prompt.holdings_flaw = "no p2pkv cluster was named (--join)"
        elif not self._observer.has_view:
            prompt.holdings_flaw = "no p2pkv node answers"
        elif self._n_waiting >= _MOST_WAITING:
            prompt.holdings_flaw = "too many look-ups wait"
        elif (computed := self._computed(prompt)) is not None:
            keying, tokens = computed
            prompt.n_tokens = max(prompt.n_tokens, len(tokens)) if prompt.batch else len(tokens)
            await self._ask(prompt, keying.namespace, keying.page_size, lambda: keying.keys(tokens))
        elif (known := self.named.find(prompt.blocks())) is not None:
            await self._ask_known(prompt, known)
        elif len(self.named):
            prompt.holdings = Held()
        else:
            prompt.holdings_flaw = "nobody says what pages a text has"

    def learn(self, prompt: Prompt, given: object) -> None:
        """Take what an engine says of the pages of a prompt that it has computed."""
        if self._observer is None:
            return
        try:
            report = read_report(given)
        except ControlError as error:
            self._metrics.page_reports.labels("refused").inc()
            self._log.warning("report", "%s; the router does without it", error)
            return
        self._metrics.page_reports.labels("taken").inc()
        self.named.learn(prompt.blocks(), report)

    def _computed(self, prompt: Prompt) -> tuple[Keying, Sequence[int]] | None:
        keying = self._keying(prompt.model)
        tokens = keying.tokens(prompt.parts[0]) if keying is not None else None
        return (keying, tokens) if keying is not None and tokens is not None else None

    async def _ask_known(self, prompt: Prompt, known: Known) -> None:
        """Ask for pages that an engine has named, and take its word for their length as far as it can be true."""
        size = known.report.tokens_a_name
        n_units = BLOCK_BYTES if isinstance(prompt.parts[0], str) else BLOCK_TOKENS
        n_names = min(known.n_names, (known.n_blocks * n_units + _MOST_TEMPLATE) // size)
        prompt.n_tokens = max(0, prompt.n_tokens - known.n_blocks * BLOCK_TOKENS) + n_names * size
        await self._ask(prompt, known.report.namespace, size, lambda: known.report.names(n_names))

    async def _ask(
        self, prompt: Prompt, namespace: str, page_size: int, names: Callable[[], Sequence[str | bytes]]
    ) -> None:
        began = time.monotonic()
        self._n_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            places = await loop.run_in_executor(self._threads, self._places, namespace, names)
        except P2PKVError as error:
            prompt.holdings_flaw = str(error)
            return
        finally:
            self._n_waiting -= 1
            self._metrics.lookup.observe(time.monotonic() - began)
        prompt.holdings = Held.of(places, page_size)

    def _places(self, namespace: str, names: Callable[[], Sequence[str | bytes]]) -> list[Place | None]:
        assert self._observer is not None
        hasher = self._namespaces.get(namespace)
        if hasher is None:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            hasher = self._namespaces[namespace] = Namespace(namespace, self._observer.epochs)
        keys = names()
        return self._observer.places(hasher.hash(keys), _LOOK_UP_S) if keys else []

    def _keying(self, model: str) -> Keying | None:
        for tracked in self._registry:
            if model and tracked.instance.model not in ("", model):
                continue
            if (keying := Keying.of(tracked.instance)) is not None:
                return keying
        return None

    def close(self) -> None:
        """Stop asking."""
        self._threads.shutdown(cancel_futures=True)
        if self._observer is not None:
            self._observer.close()
