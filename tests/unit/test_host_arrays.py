"""Memory that is no numpy array: host tensors are taken through DLPack, device memory is refused by name."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest

from p2pkv.arrays.host import as_host_array
from p2pkv.errors import UsageError


class Tensor:
    """What a tensor of another library shows of itself; its memory is numpy's."""

    def __init__(self, array: np.ndarray[Any, Any], device: int = 1) -> None:
        self.array = array
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class CudaArray:
    """What CuPy and numba show of theirs."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (4,), "typestr": "|u1", "data": (0x7F0000000000, False), "version": 3}


def test_a_tensor_is_taken_without_a_copy() -> None:
    tensor = Tensor(np.zeros((3, 5), np.float32))
    array = as_host_array(tensor, "memory")
    array[1, 2] = 7
    assert tensor.array[1, 2] == 7
    assert (array.shape, array.dtype) == ((3, 5), np.float32)


def test_the_array_keeps_what_it_was_made_from_alive() -> None:
    array = as_host_array(Tensor(np.full(1 << 20, 3, np.uint8)), "memory")
    gc.collect()
    assert (array == 3).all()


@pytest.mark.parametrize(
    ("device", "name"), [(2, "CUDA"), (10, "ROCM"), (13, "CUDA_MANAGED"), (7, "DLPack type 7")]
)
def test_memory_of_a_device_is_refused_by_name(device: int, name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"memory is memory of a device ({name})")):
        as_host_array(Tensor(np.zeros(4), device), "memory")


def test_a_cuda_array_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="copy to host memory first"):
        as_host_array(CudaArray(), "memory")


def test_what_numpy_has_no_type_for_says_so() -> None:
    class Bfloat16(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("unsupported dtype bfloat16")

    with pytest.raises(UsageError, match="bfloat16\\) has to be viewed as uint8 first"):
        as_host_array(Bfloat16(np.zeros(4)), "memory")


def test_anything_else_is_refused_by_its_type() -> None:
    with pytest.raises(UsageError, match="not bytes"):
        as_host_array(b"bytes", "memory")
