"""Who writes a router's files, and knows what holds: the last content of each that could be used."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fake_engines import FakeEngine
from hunts.frame import Broken, Tally
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Files
from p2pkv_proxy.policies import POLICIES

FEW, _MANY = 1, 1024
"""Requests at once that settings allow."""
SHORT_S, LONG_S = 0.15, 60.0
"""For an engine's next bytes; engines here are on a busy loop themselves, so the short one is for one stream alone."""
KEYS = [f"sk-{name}-0123456789abcdef" for name in ("ours", "theirs", "others")]
_ENGINES_KEYS = ["sk-engines-one", "sk-engines-two"]


@dataclass(frozen=True, slots=True)
class State:
    """What holds."""

    settings: str
    """As JSON."""
    instances: frozenset[int]
    keys: frozenset[str]
    engines_key: str

    @property
    def told(self) -> dict[str, object]:
        """The settings."""
        told: dict[str, object] = json.loads(self.settings)
        return told


class File:
    """One file, as the operator writes it, and what a router must make of it."""

    def __init__(self, path: Path, name: str, text: Callable[[object], str], value: object) -> None:
        self.path = path
        self.name = name
        self._text = text
        self.in_force = self._value = value
        self._version = self._seen = self._taken = 0
        self.write(value)

    def write(self, value: object) -> None:
        """Write what can be used."""
        self._put(self._text(value), value)

    def text(self, value: object) -> str:
        return self._text(value)

    def break_by(self, text: str | None, *, mode: int = 0o600) -> None:
        """Write what can't be; None: remove it."""
        if text is None:
            if self.path.exists():  # one that is not there can't become another one by being removed
                self.path.unlink()
                self._version, self._value = self._version + 1, None
        else:
            self._put(text, None, mode)

    def note_look(self) -> bool:
        """Note what a look must do; whether that changes something."""
        is_settled, self._seen = self._version == self._seen, self._version
        return self._note() if is_settled and self._version != self._taken else False

    def note_order(self) -> bool:
        """Note what an order to read all must do."""
        self._seen = self._version
        return self._note()

    @property
    def is_refused(self) -> bool:
        """Whether what it said when it was read last can't be used."""
        return self._refused

    _refused = False

    def _note(self) -> bool:
        self._taken = self._version
        self._refused = self._value is None
        is_new = self._value is not None and self._value != self.in_force
        if self._value is not None:
            self.in_force = self._value
        return is_new

    def _put(self, text: str, value: object, mode: int = 0o600) -> None:
        self._version += 1
        self._value = value
        self.path.write_text(text)
        self.path.chmod(mode)
        os.utime(self.path, ns=(0, self._version * 10**9))  # clocks of file systems stand still for some ms


@dataclass(slots=True)
class Asked:
    """A request under way."""

    states: list[State]
    """What has held since it began, until its answer did."""
    is_begun: bool = False
    prompt: str = ""
    reloads: int = field(default=0)


class Operator:
    """Writes files and has them read again, and knows what holds."""

    def __init__(self, rng: random.Random, tally: Tally, folder: Path, engines: Sequence[FakeEngine]) -> None:
        self._rng = rng
        self._tally = tally
        self._engines = engines
        self.under_way: list[Asked] = []
        self.answer_timeout = LONG_S
        self.app: App
        self._settings = File(folder / "settings", "settings", str, self._some_settings())
        self._instances = File(folder / "instances", "instances", self._listed, self._some_instances())
        self._keys = File(folder / "keys", "api_keys", self._lines, frozenset(KEYS))
        self._engines_key = File(folder / "engines_key", "engines_key", str, _ENGINES_KEYS[0])
        self._files = [self._settings, self._instances, self._keys, self._engines_key]
        self.files = Files(
            settings=self._settings.path,
            instances=self._instances.path,
            api_keys=self._keys.path,
            engines_key=self._engines_key.path,
        )

    @property
    def state(self) -> State:
        """What holds now."""
        return State(*(file.in_force for file in self._files))  # type: ignore[arg-type]

    async def work(self, n_steps: int) -> None:
        """Write and read, so many times, while others do something."""
        for _ in range(n_steps):
            for _ in range(self._rng.randrange(30)):
                await asyncio.sleep(0)
            self._step()

    def end(self) -> None:
        """Put everything in order, and demand that it is in force."""
        for file, value in zip(
            self._files, ("{}", frozenset([0, 1]), frozenset(KEYS), "sk-engines"), strict=True
        ):
            file.write(value)
        self._look()
        self._look()
        if self.app.reloading.refused:
            raise Broken(f"all files are in order, and {self.app.reloading.refused} are refused")

    def shorten(self) -> None:
        """Have engines' next bytes come at once from now on."""
        self.answer_timeout = SHORT_S
        self._settings.write(json.dumps({"answer_timeout": SHORT_S}))
        self._order()

    def _step(self) -> None:
        file = self._rng.choice(self._files)
        match self._rng.randrange(6):
            case 0 | 1:
                file.write(self._some(file))
            case 2:
                self._break(file)
            case 3:
                self._order()
            case _:
                self._look()

    def _break(self, file: File) -> None:
        whole = file.text(self._some(file))
        broken: list[str | None] = [None, "", "{", "\x00" * 10, '{"atempts": 1}', '[{"url": 5}]']
        if file is self._settings:
            broken += [whole[: self._rng.randrange(len(whole))], whole[:-1] + ', "workers": 2}']
            broken.append('{"policy": "random", "attempts": 3, "tenants": {"a": {"priority": "x"}}}')
        if file is self._instances:
            broken += [whole[:-1], whole[:-1] + ', {"role": "both"}]', "[" + whole[1:-1] + "," + whole[1:]]
        if file is self._keys:
            broken += [whole + "short\n", whole + whole]
            if self._rng.random() < 0.2:
                file.break_by(whole, mode=0o644)
                return
        if file is self._engines_key:
            broken = [None, "", "one\ntwo\n"]
        file.break_by(self._rng.choice(broken))

    def _some(self, file: File) -> object:
        if file is self._settings:
            return self._some_settings()
        if file is self._instances:
            return self._some_instances()
        if file is self._keys:
            return frozenset(self._rng.sample(KEYS, self._rng.randint(1, len(KEYS))))
        return self._rng.choice(_ENGINES_KEYS)

    def _some_settings(self) -> str:
        told: dict[str, object] = {
            "policy": self._rng.choice(list(POLICIES)),
            "decode_policy": self._rng.choice(list(POLICIES)),
            "max_in_flight": self._rng.choice([FEW, _MANY, _MANY, _MANY]),
            "answer_timeout": self.answer_timeout,
            "attempts": self._rng.randint(1, 4),
            "tenants": {"a": {"priority": self._rng.randrange(5)}},
        }
        return json.dumps(
            {name: told[name] for name in self._rng.sample(list(told), self._rng.randint(0, 6))}
        )

    def _some_instances(self) -> frozenset[int]:
        """The first one is always there: else there would be nobody for a moment."""
        rest = range(1, len(self._engines))
        return frozenset([0, *self._rng.sample(rest, self._rng.randint(0, len(rest)))])

    def _listed(self, value: object) -> str:
        assert isinstance(value, frozenset)
        capacity = self._rng.choice([0, 500])
        return json.dumps(
            [
                {"url": self._engines[i].instance.url, "role": "both", "capacity": capacity}
                for i in sorted(value)
            ]
        )

    @staticmethod
    def _lines(value: object) -> str:
        assert isinstance(value, frozenset)
        return "".join(f"{key}\n" for key in sorted(value))

    def _look(self) -> None:
        self._note([file.note_look() for file in self._files])
        self.app.reloading.look()
        self._judge()

    def _order(self) -> None:
        self._note([file.note_order() for file in self._files])
        self.app.reload()
        self._judge()

    def _note(self, changes: list[bool]) -> None:
        self._tally["files taken"] += sum(changes)
        self._tally["files refused"] += sum(file.is_refused for file in self._files)
        for asked in self.under_way:
            asked.reloads += any(changes)
            if not asked.is_begun:
                asked.states.append(self.state)

    def _judge(self) -> None:
        """Demand that what is in force, everywhere, is what must be."""
        app, state = self.app, self.state
        refused = [file.name for file in self._files if file.is_refused]
        if app.reloading.refused != refused:
            raise Broken(f"refused are {app.reloading.refused}, not {refused}")
        services = app._services
        assert services is not None
        told = state.told
        expected = {name: value for name, value in told.items() if name in ("attempts", "max_in_flight")}
        found = app.reloading.plan.in_force
        for name in ("max_in_flight", "attempts", "answer_timeout"):
            value = expected.get(name, told.get(name, getattr(app.reloading.plan.settings, name)))
            if getattr(found, name) != value:
                raise Broken(f"{name} is {getattr(found, name)}, not {value}")
        for part in (services, services.router, services.waiting_room, services.engines._settings):
            if getattr(part, "settings", part) != found:
                raise Broken(f"{type(part).__name__} goes by other settings than the rest")
        names = [str(told.get("policy", "prefix")), str(told.get("decode_policy", "least_loaded"))]
        policies = [type(services.router.prefill_policy), type(services.router.decode_policy)]
        if policies != [POLICIES[name] for name in names]:
            raise Broken(f"the policies are {policies}, not {names}")
        listed = {tracked.id for tracked in app.registry if tracked.is_listed}
        wanted = {self._engines[i].instance.id for i in state.instances}
        if listed != wanted:
            raise Broken(f"listed are {listed}, not {wanted}")
