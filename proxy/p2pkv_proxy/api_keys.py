"""Who may use the router: the API keys that clients send as ``Authorization: Bearer KEY``."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from p2pkv.errors import ConfigError

VARIABLE = "P2PKV_PROXY_API_KEYS"
_LEAST_BYTES = 16
_MOST_BYTES = 512
_MOST_FILE = 4 << 20
_PRINTABLE = frozenset(range(0x21, 0x7F))


class ApiKeys:
    """Names by key.

    Keys are kept and looked for as digests under a secret of this process: how long that takes says nothing of a key.
    """

    def __init__(self, lines: Iterable[str], where: str) -> None:
        """Take ``KEY`` or ``NAME KEY`` a line; a key without a name is called by its number.

        Raises :class:`ConfigError`.
        """
        self._pepper = secrets.token_bytes(32)
        self._names = self._read(lines, where)

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Return those of a file. Raises :class:`ConfigError`."""
        return cls(_lines_of(path), str(path))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def name_of(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Return whose key a request has; None if it has none, a wrong one, or several."""
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return None
        scheme, _, key = given[0].partition(b" ")
        return self._names.get(self._digest(key.strip())) if scheme.lower() == b"bearer" else None

    def _read(self, lines: Iterable[str], where: str) -> dict[bytes, str]:
        found: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            # never the line itself in a message: it would put a key into a log
            if len(words) > 2:
                raise ConfigError(
                    f"{where}, line {number}: a line is KEY or NAME KEY, not {len(words)} words"
                )
            key = words[-1].encode()
            if not _LEAST_BYTES <= len(key) <= _MOST_BYTES or not _PRINTABLE.issuperset(key):
                raise ConfigError(
                    f"{where}, line {number}: a key has {_LEAST_BYTES} to {_MOST_BYTES} printable ASCII characters; "
                    "make one with: openssl rand -hex 32"
                )
            digest = self._digest(key)
            if digest in found:
                raise ConfigError(f"{where}, line {number}: the key is there twice")
            found[digest] = words[0] if len(words) == 2 else f"key-{number}"
        if not found:
            raise ConfigError(
                f"{where} has no API key, so nobody could use the router; leave it out to let in everybody"
            )
        return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._pepper, digest_size=16).digest()


def keys_in_environment(path: Path | None) -> ApiKeys | None:
    """Return the keys of the environment, None if it has none; ``path`` is where a file has some.

    Raises :class:`ConfigError`.
    """
    found = os.environ.get(VARIABLE)
    if found is None:
        return None
    if path is not None:
        raise ConfigError(f"API keys are given twice: by --api-keys and by {VARIABLE}; leave out one")
    return ApiKeys(found.replace(",", "\n").splitlines(), VARIABLE)


def read_engines_key(path: Path) -> bytes:
    """Return the key in a file, which engines are told. Raises :class:`ConfigError`."""
    keys = [line.strip() for line in _lines_of(path) if line.strip()]
    if len(keys) != 1 or not _PRINTABLE.issuperset(keys[0].encode()):
        raise ConfigError(
            f"{path} must have one line with the engines' API key, of printable ASCII characters"
        )
    return keys[0].encode()


def _lines_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(_MOST_FILE + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read API keys from {path}: {error}") from error
    if mode & 0o007:
        raise ConfigError(
            f"the API keys in {path} can be read or written by anybody (mode {mode:04o}); chmod 640 it"
        )
    if len(raw) > _MOST_FILE:
        raise ConfigError(f"{path} has more than {_MOST_FILE} bytes, which is no list of API keys")
    return text.splitlines()
