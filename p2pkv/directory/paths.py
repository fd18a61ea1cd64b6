"""The two paths to other nodes' shards, as the directory's client uses them. Simulations bring their own."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Reply
from p2pkv.directory.view import Member, View
from p2pkv.page import Keys

if TYPE_CHECKING:
    from typing_extensions import Self


class Answers(Protocol):
    """Requests under way, given up when the ``with`` block ends; :class:`p2pkv.control.sockets.Calls` is one."""

    def next(self, timeout: float) -> tuple[int, Reply] | None:
        """Return the index of a request and its reply; None after ``timeout`` seconds or if none is to come."""

    def are_pending(self) -> bool:
        """Whether some request may still be answered."""

    def ask_instead(self, index: int, request: Request) -> None:
        """Send another request in the place of one that was answered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class ControlPath(Protocol):
    """Leads to every node, and is slow; :class:`p2pkv.control.sockets.ControlClient` is one."""

    is_closed: bool
    """Whether calls are to end."""

    def send(self, requests: Sequence[Request]) -> Answers:
        """Send every request at once."""


class ChannelPath(Protocol):
    """Leads where a channel is; :class:`p2pkv.directory.channels.DirectoryChannels` is one."""

    def set_view(self, view: View) -> None:
        """Hang up on nodes that are gone or were restarted."""

    def borrow(self, members: Sequence[Member]) -> list[_native.DirectoryChannel | None]:
        """Return a channel to each; None where none is free."""

    def give_back(
        self,
        members: Sequence[Member],
        channels: Sequence[_native.DirectoryChannel],
        is_usable: Sequence[bool],
    ) -> None:
        """Keep those that can be used again; the others close."""

    def release(self, member: Member, lease: int, seconds: float) -> None:
        """Tell a node, now or later, that a lease of ``seconds`` is over."""

    def touch(self, member: Member, keys: Keys) -> int:
        """Tell a node that its pages were read; return of how many it was told."""
