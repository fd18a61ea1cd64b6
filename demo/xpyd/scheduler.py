"""Many requests at once on one model: a thread that computes a page or a token of each in turn.

Pages are shared through a store as the demo's ``Engine`` does. A request's outputs do not depend on who else is being
served, nor on which of its pages came from elsewhere (see ``demo.model``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from demo.engine import PageStore
from demo.model import PAGE, Model, Tokens
from demo.paged_kv import PagedKV, page_keys

_log = logging.getLogger(__name__)
_STORE_S = 0.5
"""A call to the store may take so long; then the pages are computed."""


class Ending(Enum):
    """How a request ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Job:
    """One request. ``on_token`` and ``on_end`` are called on the scheduler's thread, the latter once, at last."""

    def __init__(
        self,
        prompt: Tokens,
        n_new: int,
        on_token: Callable[[int], None],
        on_end: Callable[[Ending], None],
    ) -> None:
        self.prompt = prompt
        self.n_new = n_new
        """Tokens to generate; 0: only the prompt's pages are wanted, in the store."""
        self.on_token = on_token
        self.on_end = on_end
        self.is_cancelled = False
        """Set by whoever no longer wants it, from any thread."""
        self.n_reused = 0
        """Tokens whose pages came from the store."""
        self.n_computed = 0

    @property
    def n_pages(self) -> int:
        """Pages of KV it needs at most."""
        return -(-(len(self.prompt) + self.n_new) // PAGE)


class _Running:
    """A job with its pages of KV."""

    def __init__(self, job: Job, model: Model, kv: PagedKV, store: PageStore | None) -> None:
        self.job = job
        self._model = model
        self._kv = kv
        self._store = store
        self._tokens = list(job.prompt)
        self._pages = kv.take(job.n_pages)
        # the last token is always computed: the first new one comes from its hidden state
        self._keys = page_keys(job.prompt if job.n_new == 0 else job.prompt[:-1], PAGE)
        self._n_filled = self._fetch()
        self._n_fetched = self._n_filled
        self._n_prompt_pages = len(self._keys) if job.n_new == 0 else -(-len(job.prompt) // PAGE)
        self._n_new = 0
        job.n_reused = self._n_fetched * PAGE

    def _fetch(self) -> int:
        if self._store is None or not self._keys:
            return 0
        n_there = _n_leading(self._store.exists(self._keys, _STORE_S))
        if n_there == 0:
            return 0
        spans = self._kv.spans(self._pages[:n_there])
        return _n_leading(self._store.fetch(self._keys[:n_there], spans, _STORE_S))

    def step(self) -> bool:
        """Compute one page of the prompt, or one token; return whether that was the last."""
        if self._n_filled < self._n_prompt_pages:
            self._compute(self._n_filled)
            self._n_filled += 1
            self.job.n_computed += PAGE
            if self._n_filled < self._n_prompt_pages:
                return False
            self._publish()
            if self.job.n_new == 0:
                return True
        elif self.job.n_new == 0:
            return True
        else:
            self._compute((len(self._tokens) - 1) // PAGE)
        token = self._model.next_token(self._hidden[(len(self._tokens) - 1) % PAGE])
        self._tokens.append(token)
        self._n_new += 1
        self.job.on_token(token)
        return self._n_new >= self.job.n_new

    def _compute(self, page: int) -> None:
        tokens = self._tokens[page * PAGE : (page + 1) * PAGE]
        self._hidden = self._model.run_page(tokens, self._pages[: page + 1], self._kv)

    def _publish(self) -> None:
        if self._store is not None and self._n_fetched < len(self._keys):
            spans = self._kv.spans(self._pages[self._n_fetched : len(self._keys)])
            self._store.publish(self._keys[self._n_fetched :], spans, _STORE_S)

    def close(self) -> None:
        """Give the pages back."""
        self._kv.give_back(self._pages)


class Scheduler:
    """Runs jobs until :meth:`close`, from a thread of its own. ``kv`` is its alone meanwhile."""

    def __init__(self, model: Model, kv: PagedKV, store: PageStore | None) -> None:
        self._model = model
        self._kv = kv
        self._store = store
        self._changed = threading.Condition()  # guards the four below
        self._waiting: deque[Job] = deque()
        self._n_running = 0
        self._is_closing = False
        self.n_reused = 0
        """Tokens of all prompts so far whose pages came from the store."""
        self.n_computed = 0
        self._running: list[_Running] = []  # the thread's own
        self._thread = threading.Thread(target=self._run, name="p2pkv-demo-scheduler", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. It must fit into the KV cache alone."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Jobs that are worked on, and that wait."""
        with self._changed:
            return self._n_running, len(self._waiting)

    @property
    def kv(self) -> tuple[int, int]:
        """Tokens that there is KV of, or room reserved for, and tokens that there is room for."""
        capacity = len(self._kv.k) * PAGE
        return capacity - self._kv.n_free * PAGE, capacity

    def close(self) -> None:
        """Stop; what has not ended is cancelled."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._admit():
                for running in list(self._running):
                    if running.job.is_cancelled:
                        self._end(running, Ending.CANCELLED)
                    elif running.step():
                        self._end(running, Ending.DONE)
        except Exception:  # noqa: BLE001 - the top of a thread
            _log.exception("the scheduler has failed")
            self._abandon(Ending.FAILED)
        else:
            self._abandon(Ending.CANCELLED)

    def _admit(self) -> bool:
        """Take in what fits, and wait for something to do; return False when closing."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._is_closing)
                if self._is_closing:
                    return False
                if not self._waiting or not self._fits(self._waiting[0]):
                    return True
                job = self._waiting.popleft()
                self._n_running += 1
            self._running.append(_Running(job, self._model, self._kv, self._store))

    def _fits(self, job: Job) -> bool:
        return job.n_pages <= self._kv.n_free

    def _end(self, running: _Running, how: Ending) -> None:
        self._running.remove(running)
        running.close()
        job = running.job
        with self._changed:
            self._n_running -= 1
            self.n_reused += job.n_reused
            self.n_computed += job.n_computed
        job.on_end(how)

    def _abandon(self, how: Ending) -> None:
        for running in list(self._running):
            self._end(running, how)
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            job.on_end(how)


def _n_leading(outcomes: NDArray[np.uint8]) -> int:
    """Count the hits before the first miss."""
    return int(np.logical_and.accumulate(outcomes != 0).sum())
