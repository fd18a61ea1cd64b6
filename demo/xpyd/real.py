"""``make demo-xpyd ENGINE=sglang`` or ``vllm``: the router before a real prefill and a real decode on a CPU.

One instance alone is asked first; then the pair answers the same requests through the router, in three parts. In the
middle of the second the prefill is killed, and started again; the third is sent when it is back.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.error
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from demo.xpyd.kinds import ENGINES, Kind
from demo.xpyd.load import Answered, Asked, Tally, drive, mixed
from demo.xpyd.processes import Child, RouterProcess, StartError, get
from demo.xpyd.show import Show, judge, show_choices

if TYPE_CHECKING:
    from typing_extensions import Self

READY_S = 420.0
"""Starting takes 25 to 120 s on two cores, most of it imports."""
_PATIENCE_S = READY_S + 60.0
_LOOK_S = 0.5
_SHORT_S = 0.05
_AT_ONCE = 8.0
"""Requests a second to the instance alone; it queues what it can't do at once."""


def run(console: Console, engine: str, n_requests: int, rate: float) -> int:
    """Run the demo with a real engine; return its exit status. Raises :class:`StartError`."""
    kind = ENGINES[engine]()
    load = mixed(n_requests, seed=1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        right = _answers_alone(console, kind, load, Path(folder))
        with _Pair(kind, Path(folder)) as pair:
            with console.status(f"a router, a {kind.name} prefill and a decode start"):
                pair.start("prefill")
                pair.start("decode")
                pair.wait("prefill", "decode")
                router = pair.start_router()
                router.wait("prefill", "decode")
            console.print(f"the router serves {router.url}; {n_requests} requests, {rate:g} a second")
            show, tally = Show(router.known), Tally()
            with Live(show.table(tally), console=console, refresh_per_second=4) as live:
                asyncio.run(_Scenario(pair, router, tally, show, live).run(load, rate))
                live.update(show.table(tally))
            console.print()
            amount, said = kind.handed_over()
            show_choices(console, router.metrics())
    n_again = sum(one.n_asked - 1 for one in tally.answered)
    console.print(f"asked again by clients, as the router had told them: {n_again}")
    console.print(said)
    wrong = [one for one in tally.answered if not _is_right(one, right)]
    status = judge(console, tally, wrong, f"one {kind.name} instance alone")
    if not amount:
        console.print("[bold red]✗ no KV came from the prefill[/]")
        status = 1
    console.print(f"took {time.monotonic() - began:.0f} s")
    return status


def _answers_alone(
    console: Console, kind: Kind, load: list[Asked], folder: Path
) -> dict[Asked, tuple[str, list[int]]]:
    """Have one instance answer everything, so that there is something to compare with."""
    with console.status(f"one {kind.name} instance starts alone"), _Pair(kind, folder) as pair:
        pair.start("alone")
        pair.wait("alone")
        tally = Tally()
        asyncio.run(drive(kind.url("alone"), load, tally, _AT_ONCE, fields=kind.fields))
    failed = [one.error for one in tally.answered if one.error]
    if failed:
        raise StartError(f"one {kind.name} instance alone failed {len(failed)} requests: {failed[0]}")
    n_tokens = sum(len(one.ids) for one in tally.answered)
    console.print(f"one {kind.name} instance alone has answered {len(load)} requests with {n_tokens} tokens")
    return {one.asked: (one.text, one.ids) for one in tally.answered}


def _is_right(one: Answered, right: Mapping[Asked, tuple[str, list[int]]]) -> bool:
    """Whether an answer is what one instance alone says, or the beginning of that if it broke off."""
    text, ids = right[one.asked]
    if one.error:
        return text.startswith(one.text) and ids[: len(one.ids)] == one.ids
    return (one.text, one.ids) == (text, ids)


class _Pair:
    """The processes, by name. Use it in a ``with`` statement."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._engines: dict[str, Child] = {}
        self._undo = ExitStack()

    def start(self, name: str) -> None:
        """Start an engine, at the place where it was before if it was."""
        recipe = self.kind.recipe(name)
        if not Path(recipe.command[0]).exists():
            raise StartError(
                f"{recipe.command[0]} is not there; make demo-xpyd ENGINE=... installs the engine"
            )
        engine = Child(name, recipe.command, recipe.environment, folder=self._folder)
        self._engines[name] = engine
        self._undo.enter_context(_killed_at_the_end(engine))

    def start_router(self) -> RouterProcess:
        """Start the router before the pair."""
        router = RouterProcess(["--heartbeats", "", *self.kind.router_options])
        self._undo.enter_context(_killed_at_the_end(router))
        return router

    def kill(self, name: str) -> None:
        """End one as a crash does."""
        self._engines[name].kill()

    def wait(self, *names: str) -> None:
        """Wait until these answer. Raises :class:`StartError`."""
        deadline = time.monotonic() + READY_S
        while not all(self.is_ready(name) for name in names):
            if time.monotonic() > deadline:
                raise StartError(f"{' and '.join(names)} did not start in {READY_S:g} s")
            time.sleep(_LOOK_S)

    def is_ready(self, name: str) -> bool:
        """Whether it answers. Raises :class:`StartError` if it has ended."""
        engine = self._engines[name]
        if not engine.is_running:
            raise StartError(f"{name} has ended:\n{engine.last_words()}")
        try:
            get(f"{self.kind.url(name)}/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()


@contextmanager
def _killed_at_the_end(child: Child) -> Iterator[None]:
    """Don't ask engines to end: they take longer than a demo may, and have nothing to lose."""
    with closing(child):
        try:
            yield
        finally:
            child.kill()


class _Scenario:
    """Three parts of the load, and what happens to the prefill in the second."""

    def __init__(self, pair: _Pair, router: RouterProcess, tally: Tally, show: Show, live: Live) -> None:
        self._pair = pair
        self._router = router
        self._tally = tally
        self._show = show
        self._live = live

    async def run(self, load: list[Asked], rate: float) -> None:
        """Drive everything."""
        third = len(load) // 3
        await self._look_on(self._drive(load[:third], rate))
        second = self._drive(load[third : 2 * third], rate)
        await self._look_on(second, self._fall_and_rise(third + third // 2))
        await self._look_on(self._drive(load[2 * third :], rate))

    def _drive(self, load: list[Asked], rate: float) -> Coroutine[object, object, None]:
        return drive(
            self._router.url, load, self._tally, rate, fields=self._pair.kind.fields, patience=_PATIENCE_S
        )

    async def _fall_and_rise(self, n_sent: int) -> None:
        """Kill the prefill when so many requests have been sent, and wait until it is used again."""
        while self._tally.n_sent < n_sent:
            await asyncio.sleep(_SHORT_S)
        self._pair.kill("prefill")
        began = time.monotonic()
        self._show.note(f"the prefill is killed; {self._pair.kind.without_prefill}")
        self._pair.start("prefill")
        await asyncio.to_thread(self._pair.wait, "prefill")
        await asyncio.to_thread(self._router.wait, "prefill")
        self._show.note(f"started again, the prefill is back after {time.monotonic() - began:.0f} s")

    async def _look_on(self, *work: Coroutine[object, object, None]) -> None:
        """Show the table while this is done."""
        doing = asyncio.gather(*work)
        try:
            while not doing.done():
                await asyncio.wait({doing}, timeout=_LOOK_S)
                self._live.update(await asyncio.to_thread(self._show.table, self._tally))
            await doing
        finally:
            doing.cancel()
