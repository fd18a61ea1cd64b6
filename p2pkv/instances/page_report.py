"""What an engine says to a router of the pages of one prompt, in its answer's ``kv_transfer_params``.

A router that knows the names can ask the directory who has these pages, without knowing how the engine makes names of
prompts. It takes the report out: decodes don't get it. ``docs/xpyd.md`` has every field.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import msgspec

from p2pkv.errors import ControlError
from p2pkv.message_types import worked_out

FIELD = "p2pkv_pages"
"""Of ``kv_transfer_params``."""
VERSION = 1
MOST_NAMES = 512
"""Of a longer prompt every second page is named, or every third: each covers all before it."""
_MOST_NAME = 256
_MOST_TEXT = 2048
_MOST_TOKENS = 1 << 24


@worked_out
class PageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of a prompt, in their order; each name is as long as all others."""

    namespace: str
    """Of the node that published them."""
    tokens_a_name: int
    """Tokens of the prompt from one name to the next."""
    n_tokens: int
    """The prompt's."""
    name_size: int
    """Bytes of each name."""
    packed: bytes
    """The names, one after another."""
    version: int = VERSION

    @property
    def n_names(self) -> int:
        """Pages that are named."""
        return len(self.packed) // self.name_size

    def names(self, most: int) -> list[bytes]:
        """Return the first names."""
        ends = range(self.name_size, min(most, self.n_names) * self.name_size + 1, self.name_size)
        return [self.packed[end - self.name_size : end] for end in ends]

    def n_common(self, other: PageReport) -> int:
        """Return how many names both begin with."""
        if (self.namespace, self.name_size, self.tokens_a_name) != (
            other.namespace,
            other.name_size,
            other.tokens_a_name,
        ):
            return 0
        low, high = 0, min(self.n_names, other.n_names)
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self.name_size
            low, high = (middle, high) if self.packed[:end] == other.packed[:end] else (low, middle - 1)
        return low


def report_of(namespace: str, names: Sequence[bytes], *, page_size: int, n_tokens: int) -> dict[str, object]:
    """Return the report of a prompt of ``n_tokens``, whose whole pages of ``page_size`` tokens have these names."""
    every = -(-len(names) // MOST_NAMES) or 1
    named = names[every - 1 :: every]
    report = PageReport(
        namespace=namespace,
        tokens_a_name=every * page_size,
        n_tokens=n_tokens,
        name_size=len(names[0]) if names else 1,
        packed=b"".join(named),
    )
    return {**msgspec.structs.asdict(report), "packed": base64.b64encode(report.packed).decode()}


def read_report(given: object) -> PageReport:
    """Check what an engine has said. Raises :class:`ControlError` for what can't be used."""
    if not isinstance(given, dict):
        raise ControlError(f"a report of pages is no {type(given).__name__}")
    if given.get("version") != VERSION:
        raise ControlError(
            f"a report of pages has version {given.get('version')!r:.40}, this router reads {VERSION}"
        )
    packed = given.get("packed")
    if not isinstance(packed, str) or len(packed) > (MOST_NAMES * _MOST_NAME + 2) // 3 * 4:
        raise ControlError("a report of pages has no names, or too many")
    try:
        names = base64.b64decode(packed, validate=True)
        report = msgspec.convert({**given, "packed": names}, PageReport)
    except (binascii.Error, ValueError, msgspec.ValidationError) as error:
        raise ControlError(f"a report of pages can't be read: {error}") from error
    is_fit = (
        0 < report.name_size <= _MOST_NAME
        and len(names) % report.name_size == 0
        and report.n_names <= MOST_NAMES
        and report.tokens_a_name > 0
        and report.n_names * report.tokens_a_name <= report.n_tokens <= _MOST_TOKENS
        and len(report.namespace) <= _MOST_TEXT
    )
    if not is_fit:
        raise ControlError("a report of pages has impossible sizes")
    return report
