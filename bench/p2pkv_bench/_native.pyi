"""The native part of the benchmark (bench/native/streams.cc). Offsets, lengths and ``nbytes`` are bytes."""

import numpy as np
from numpy.typing import NDArray

def receive_spans(fd: int, base: int, spans: NDArray[np.int64]) -> int: ...
def serve_spans(fd: int, base: int, nbytes: int) -> int: ...
