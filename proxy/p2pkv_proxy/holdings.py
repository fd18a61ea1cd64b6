"""How much of a prompt each p2pkv node already holds: what ``cache_aware`` weighs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import Histogram

from p2pkv.errors import P2PKVError
from p2pkv.page import Namespace
from p2pkv_proxy.held import Held, Place
from p2pkv_proxy.observer import DirectoryObserver
from p2pkv_proxy.page_keys import Keying
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.registry import Registry

_LOOK_UP_S = 0.02
"""An answer that takes longer is worth less than the time."""
_THREADS = 2
_MOST_WAITING = 32


class Holdings:
    """Asks the directory, if there is one. Without an answer a prompt says why."""

    def __init__(self, registry: Registry, observer: DirectoryObserver | None, seconds: Histogram) -> None:
        self._registry = registry
        self._observer = observer
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="p2pkv-lookup")
        self._n_waiting = 0
        self._namespaces: dict[str, Namespace] = {}

    async def look_up(self, prompt: Prompt) -> None:
        """Fill in ``prompt.holdings``, or why they are not known."""
        if self._observer is None:
            prompt.holdings_flaw = "no p2pkv cluster was named (--join)"
        elif not self._observer.has_view:
            prompt.holdings_flaw = "no p2pkv node answers"
        elif (keying := self._keying(prompt.model)) is None:
            prompt.holdings_flaw = "no instance says how it names its pages"
        elif (tokens := keying.tokens(prompt.parts[0])) is None:
            prompt.holdings_flaw = "the text's tokens are not known here"
        elif self._n_waiting >= _MOST_WAITING:
            prompt.holdings_flaw = "too many look-ups wait"
        else:
            prompt.n_tokens = max(prompt.n_tokens, len(tokens)) if prompt.batch else len(tokens)
            await self._ask(self._observer, prompt, keying, tokens)

    async def _ask(
        self, observer: DirectoryObserver, prompt: Prompt, keying: Keying, tokens: Sequence[int]
    ) -> None:
        began = time.monotonic()
        self._n_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            places = await loop.run_in_executor(self._threads, self._places, observer, keying, tokens)
        except P2PKVError as error:
            prompt.holdings_flaw = str(error)
            return
        finally:
            self._n_waiting -= 1
            self._seconds.observe(time.monotonic() - began)
        prompt.holdings = Held.of(places, keying.page_size)

    def _places(
        self, observer: DirectoryObserver, keying: Keying, tokens: Sequence[int]
    ) -> list[Place | None]:
        namespace = self._namespaces.get(keying.namespace)
        if namespace is None:
            namespace = Namespace(keying.namespace, observer.epochs)
            self._namespaces[keying.namespace] = namespace
        keys = keying.keys(tokens)
        return observer.places(namespace.hash(keys), _LOOK_UP_S) if keys else []

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
