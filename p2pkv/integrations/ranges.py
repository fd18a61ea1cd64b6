"""Memory of an engine's that is to be registered with a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2pkv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Range:
    """A tensor's or array's memory; ``owner`` keeps it alive."""

    address: int
    nbytes: int
    owner: object

    @classmethod
    def of(cls, buffer: object) -> Range:
        """Take a torch tensor, or anything that lends its memory as numpy arrays do; it must be contiguous."""
        data_ptr = getattr(buffer, "data_ptr", None)
        if data_ptr is None:
            return cls._of_array(buffer)
        is_contiguous = getattr(buffer, "is_contiguous", None)
        if is_contiguous is not None and not is_contiguous():
            raise UsageError(f"a {type(buffer).__name__} that is not contiguous can't be read as one page")
        nbytes = getattr(buffer, "nbytes", None)  # of every tensor since torch 2.1
        if nbytes is None:
            nbytes = buffer.numel() * buffer.element_size()  # type: ignore[attr-defined]
        return cls(data_ptr(), int(nbytes), buffer)

    @classmethod
    def _of_array(cls, buffer: object) -> Range:
        try:
            array = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(f"{type(buffer).__name__} is neither a tensor nor an array") from None
        if not array.flags.c_contiguous:
            raise UsageError(f"an array of strides {array.strides} is not contiguous")
        return cls(array.ctypes.data, array.nbytes, array)


def storages(tensors: Iterable[Any]) -> list[Range]:
    """Return each memory that torch's tensors lie in once, whole: their parts of it may lie between each other."""
    found = {int(s.data_ptr()): s for s in (tensor.untyped_storage() for tensor in tensors)}
    return [Range(address, int(storage.nbytes()), storage) for address, storage in sorted(found.items())]
