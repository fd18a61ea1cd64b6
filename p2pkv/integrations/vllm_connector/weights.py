"""Which weights blocks are computed with: a part of every key, so that KV of other weights is never loaded.

vLLM replaces weights while it serves (``/update_weights``, sleep, ``collective_rpc``), and then has to be told to
forget its KV (``reset_prefix_cache`` with ``reset_connector``), and may be told a version (``finish_weight_update`` or
``/update_weight_version``), in either order. With both, blocks are those of every instance that was told so; with one
alone nobody knows who else has such KV, so the instance shares with itself only.

vLLM tells its connector of a reset, but nobody of a version: that is heard where its engine keeps it, by a method of
the engine's class that is wrapped in memory.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import weakref
from collections.abc import Sequence

from p2pkv.integrations.vllm_connector import installed


class Weights:
    """The name of the weights; used by the thread of vLLM's engine, to which its scheduler belongs."""

    def __init__(self) -> None:
        self._name = b""  # what instances have until they are told otherwise: they share
        self._told: str | None = None  # the version, if KV of earlier weights may still be there
        self._is_reset = False  # since the last version

    def told(self, version: str) -> None:
        """Take the version of the weights as they are now."""
        if self._is_reset:
            self._name, self._is_reset, self._told = _of_version(version), False, None
        else:
            self._name, self._told = _own(), version

    def reset(self) -> None:
        """Take notice that vLLM has forgotten its KV, since the weights have changed."""
        if self._told is None:
            self._name, self._is_reset = _own(), True
        else:
            self._name, self._told = _of_version(self._told), None

    @property
    def name(self) -> bytes:
        """What the hashes of blocks begin with that were computed with these weights."""
        return self._name


def named(name: bytes, block_hashes: Sequence[bytes]) -> list[bytes]:
    """Return what blocks are called that were computed with the weights of that :attr:`Weights.name`."""
    return [name + bytes(block_hash) for block_hash in block_hashes]


def bare(block_name: bytes) -> bytes:
    """Return the block's hash as vLLM has it: one of SHA-256, or several where a block has several."""
    return block_name[len(block_name) % hashlib.sha256().digest_size :]


def _of_version(version: str) -> bytes:
    return hashlib.blake2b(version.encode(), digest_size=16, person=b"weights").digest()


def _own() -> bytes:
    return secrets.token_bytes(16)


served = Weights()
"""Those of this process's engine."""

_heeded: weakref.WeakSet[Weights] = weakref.WeakSet()


def watch(weights: Weights = served) -> None:
    """Have ``weights`` hear of the versions that this process's engine is told. Idempotent.

    Whoever is told of resets on its own has weights of its own: two that tell one of the same would be two resets.
    """
    _heeded.add(weights)
    engine = installed.engine_core()
    keep = getattr(engine, "set_weight_version", None)
    if keep is None or hasattr(keep, "__wrapped__"):
        return

    @functools.wraps(keep)
    def set_weight_version(self: object, weight_version: str) -> None:
        keep(self, weight_version)
        for each in list(_heeded):
            each.told(weight_version)

    engine.set_weight_version = set_weight_version
