"""What the demo and its workers say to each other: JSON objects, one a line, each with its ``type``."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from demo.engine import Generated, Prefilled
from demo.model import Tokens


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """Make the prompt's pages available to the other nodes."""

    prompt: Tokens


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Generate behind the prompt, with the pages other nodes have published."""

    prompt: Tokens
    n_new: int


class GenerateAlone(msgspec.Struct, tag=True, frozen=True):
    """Generate behind the prompt in this process alone, as if there were no p2pkv."""

    prompt: Tokens
    n_new: int


class ListMembers(msgspec.Struct, tag=True, frozen=True):
    """Say which nodes this one knows."""


Command: TypeAlias = Prefill | Generate | GenerateAlone | ListMembers


class Member(msgspec.Struct, frozen=True):
    """A node as another one sees it."""

    node_id: str
    state: str
    address: str
    transports: str


OWN_HOST = "its host"
"""An attached engine calls its host's node so, whose pool it has mapped."""


class Traffic(msgspec.Struct, frozen=True):
    """Pages that came from one node while a command ran."""

    source: str
    transport: str
    n_pages: int
    nbytes: int
    seconds: float
    """How long reading took; 0 where nobody measures it."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The worker has its model and its node; said once, before any command."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """How far the running command is; any number of these before its answer."""

    what: str
    n_done: int
    n_all: int


class PrefillDone(msgspec.Struct, tag=True, frozen=True):
    """The answer to :class:`Prefill`."""

    result: Prefilled
    traffic: list[Traffic]


class GenerateDone(msgspec.Struct, tag=True, frozen=True):
    """The answer to :class:`Generate` and :class:`GenerateAlone`."""

    result: Generated
    traffic: list[Traffic]


class Members(msgspec.Struct, tag=True, frozen=True):
    """The answer to :class:`ListMembers`."""

    members: list[Member]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker can't go on and exits."""

    reason: str


Answer: TypeAlias = Ready | Progress | PrefillDone | GenerateDone | Members | Failed
