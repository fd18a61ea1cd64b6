"""Reference pages out of what p2pkv says itself: settings of ``Config``, public names and their docstrings, commands.

Each function returns a page of Markdown. Nothing is written twice by hand, so nothing can be missing here.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import typer.main
from typer.core import TyperGroup

import p2pkv
from p2pkv.cli import app
from p2pkv.config import Config
from p2pkv.config.described import described

MODULES = (
    "p2pkv.transfers",
    "p2pkv.explain",
    "p2pkv.tracing",
    "p2pkv.membership",
    "p2pkv.transports.base",
    "p2pkv.transports.options",
    "p2pkv.testing",
)
"""Public beside ``p2pkv`` itself, as README says; those of engines are on the pages of these."""
_ONLY = {"p2pkv.tracing": ("about",)}
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?([\w()]+)`")


def settings() -> str:
    """Every setting, with its default, its variable and what it means."""
    page = [
        "# Settings",
        "",
        "What `p2pkv.Config` takes, JSON files have (`--config`), `--set KEY=VALUE` sets, and the environment gives as "
        "`P2PKV_KEY`. Sizes are numbers of bytes, or texts such as `64MiB`; times are seconds.",
    ]
    for setting in described():
        drawn = "drawn at random at each start" if setting.name == "node_id" else "nothing"
        page += [
            "",
            f"### `{setting.name}`",
            "",
            f"Default: {f'`{setting.default}`' if setting.default else drawn}; environment: `{setting.variable}`",
            "",
            _prose(setting.meaning),
        ]
    return "\n".join(page) + "\n"


def python() -> str:
    """Every public name, with its signature and its docstring."""
    page = [
        "# Python",
        "",
        "Names that may be relied upon; all others may change from one version to the next.",
    ]
    page += _module(p2pkv, sorted(p2pkv.__all__))
    for name in MODULES:
        module = importlib.import_module(name)
        page += _module(module, _ONLY.get(name) or _public(module))
    return "\n".join(page) + "\n"


def commands() -> str:
    """Every command, with its arguments and options."""
    page = ["# Commands"]
    for path, command in walk(typer.main.get_command(app), "p2pkv"):
        if isinstance(command, TyperGroup):
            continue
        page += ["", f"## `{path}`", "", _prose(command.help or "")]
        if path in ("p2pkv bench", "p2pkv replay"):
            page += ["", "Part of `p2pkv-bench`; its own `--help` has the options."]
            continue
        rows = [
            f"| `{', '.join(_names(parameter))}` | {_cell(getattr(parameter, 'help', None) or 'the argument')} |"
            for parameter in command.params
        ]
        page += ["", "| option | what |", "|---|---|", *rows] if rows else []
    return "\n".join(page) + "\n"


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a command and all below it, each with the words that it is called by."""
    yield path, command
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from walk(child, f"{path} {name}")


def _module(module: ModuleType, names: list[str] | tuple[str, ...]) -> Iterator[str]:
    yield from ("", f"## `{module.__name__}`", "", _prose(inspect.getdoc(module) or ""))
    for name in names:
        yield from _name(name, getattr(module, name))


def _name(name: str, value: object) -> Iterator[str]:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        yield from ("", f"### `{name}`", "", f"`{value!r}`" if len(repr(value)) < 200 else "")
        return
    yield from ("", f"### `{name}{_signature(value)}`", "", _prose(inspect.getdoc(value) or ""))
    if not inspect.isclass(value) or value is Config or issubclass(value, Exception):
        return
    for attribute, member in vars(value).items():
        if attribute.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if inspect.isroutine(function):
            yield from (
                "",
                f"#### `{name}.{attribute}{_signature(function)}`",
                "",
                _prose(inspect.getdoc(function) or ""),
            )
        elif isinstance(member, property):
            yield from ("", f"#### `{name}.{attribute}`", "", _prose(inspect.getdoc(member) or ""))


def _public(module: ModuleType) -> list[str]:
    names: list[str] | None = getattr(module, "__all__", None)
    if names is not None:
        return sorted(names)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def _signature(value: object) -> str:
    if inspect.isclass(value) and (value is Config or issubclass(value, Exception)):
        return ""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # native: its docstring has it
        return ""
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    return str(signature.replace(parameters=parameters)).replace("'", "")


def _names(parameter: Any) -> list[str]:
    return parameter.opts if parameter.param_type_name == "option" else [parameter.name.upper()]


def _prose(text: str) -> str:
    """Markdown of a docstring: no roles, single backticks."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("\n", " ")


PAGES = {"reference/settings.md": settings, "reference/python.md": python, "reference/commands.md": commands}
