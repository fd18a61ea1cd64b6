"""Whoever uses p2pkv is never sent inside: what calls take and give is public, and documents name nothing else."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pkv
from p2pkv import Member, Node, PeerTraffic
from p2pkv.arrays.host import SupportsCudaArray
from p2pkv.explain import Explanation
from p2pkv.tracing import CALLS, STEPS, TRANSFERS
from p2pkv.transfers import Grant, HeadMap, Offer, Transfers

ROOT = Path(__file__).resolve().parents[2]
SUBMODULES = (
    "transfers",
    "explain",
    "membership",
    "tracing",
    "transports.base",
    "transports.options",
    "testing",
    "integrations.sglang_hicache",
    "integrations.sglang_linker",
    "integrations.vllm",
    "integrations.vllm_tier",
)
"""Public beside `p2pkv` itself; README.md says so."""

IN_SPANS = {
    "p2pkv.request",
    "p2pkv.requests",
    *(f"p2pkv.{call.span}" for calls in (CALLS, STEPS, TRANSFERS) for call in calls.values()),
}
"""Names of spans and of their attributes, no modules."""

_INSIDE = {"set_view"}  # of Transfers: called by its node
_ANYBODYS = {SupportsCudaArray}  # a protocol: callers bring classes of their own


def public_classes() -> set[type]:
    modules = [
        importlib.import_module(f"p2pkv.{name}") for name in ("transfers", "explain", "transports.base")
    ]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return found | {getattr(p2pkv, name) for name in p2pkv.__all__} | _ANYBODYS


def used_classes(owner: type) -> Iterator[tuple[str, type]]:
    """Yield the classes of p2pkv that a class's public fields, and methods' signatures, name."""
    parts: list[tuple[str, object]] = [("its fields", owner)]
    parts += [(name, value) for name, value in vars(owner).items() if not name.startswith("_")]
    for name, value in parts:
        described = getattr(value, "fget", None) or getattr(value, "__func__", value)
        names = vars(inspect.getmodule(owner))
        annotations = {} if name in _INSIDE else getattr(described, "__annotations__", {})
        for named, annotation in annotations.items():
            for word in re.findall(r"\w+", str(annotation)) if not named.startswith("_") else ():
                used = names.get(word)
                if isinstance(used, type) and used.__module__.startswith("p2pkv"):
                    yield name, used


@pytest.mark.parametrize("owner", [Node, Transfers, Offer, Grant, HeadMap, Member, PeerTraffic, Explanation])
def test_what_a_call_takes_and_gives_is_public(owner: type) -> None:
    public = public_classes()
    assert [f"{name}: {used.__name__}" for name, used in used_classes(owner) if used not in public] == []


def test_a_class_that_is_not_public_is_found() -> None:
    assert ("register_memory", p2pkv.Memory) in list(used_classes(Node))
    assert ("its fields", p2pkv.State) in list(used_classes(Member))


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_public_submodule_is_there_and_in_the_readme(name: str) -> None:
    assert importlib.import_module(f"p2pkv.{name}").__doc__
    assert f"`p2pkv.{name}`" in (ROOT / "README.md").read_text()


def inside_names(text: str) -> list[str]:
    """Return what a document names that is not public."""
    text = text.replace('entry-points."p2pkv.transports"', "")  # a group, no module
    text = text.replace("`p2pkv.io/", "`")  # what Kubernetes puts before names of annotations and labels
    named = [name for name in re.findall(r"(?<![\w./-])p2pkv\.[A-Za-z_][\w.]*", text) if name not in IN_SPANS]
    for module, names in re.findall(r"from (p2pkv[\w.]*) import (.*)", text):
        named += [f"{module}.{name.strip()}" for name in names.split(",")]
    public = [f"p2pkv.{name}" for name in (*p2pkv.__all__, "__version__", *SUBMODULES)]
    return [name for name in named if not any(f"{name}.".startswith(f"{known}.") for known in public)]


def test_documents_name_what_is_public_only() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        assert inside_names(page.read_text()) == [], page.name


@pytest.mark.parametrize(
    "text",
    ["a `p2pkv._native.SharedRegion`", "from p2pkv import Node, _native", "from p2pkv.pool import Pool"],
)
def test_a_document_that_names_the_inside_is_found(text: str) -> None:
    assert inside_names(text) != []
