"""Every setting with its default and what it means, as ``Config`` itself says it: for help, and for the documents."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

from p2pkv.config.settings import Config
from p2pkv.errors import ConfigError
from p2pkv.values import nearest


class Setting(NamedTuple):
    """A setting of :class:`~p2pkv.Config`."""

    name: str
    default: str
    """As it is written; empty: there is none, or it is drawn at each start."""
    meaning: str
    """Its docstring, of several lines maybe."""

    @property
    def variable(self) -> str:
        """The name that it has in the environment."""
        return f"P2PKV_{self.name.upper()}"


def described(names: Collection[str] | None = None) -> list[Setting]:
    """Return the settings of these names; all of them, in the order in which they are declared, without.

    Raises :class:`~p2pkv.errors.ConfigError` for a name that none has.
    """
    every = {setting.name: setting for setting in _all()}
    for name in names or ():
        if name not in every:
            raise ConfigError(f"there is no setting {name!r}{nearest(name, every)}")
    return [every[name] for name in names or every]


def _all() -> list[Setting]:
    documented = attribute_docstrings(inspect.getsource(Config))
    return [
        Setting(field.name, _default(field), documented[field.name]) for field in dataclasses.fields(Config)
    ]


def attribute_docstrings(source: str) -> dict[str, str]:
    """Return the text behind each annotated attribute of a class, which Python itself does not keep."""
    [body] = [node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        attribute.target.id: inspect.cleandoc(text.value.value)
        for attribute, text in pairwise(body)
        if isinstance(attribute, ast.AnnAssign)
        and isinstance(attribute.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _default(field: dataclasses.Field[object]) -> str:
    if field.name == "node_id":
        return ""
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "" if made in ("", (), {}, None) else str(made)
