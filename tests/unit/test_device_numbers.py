"""Pieces of a call are numbered by the devices that they are of."""

import numpy as np
import pytest

from p2pkv.cache.device_rounds import number_devices


@pytest.mark.parametrize("device_of", [[[0]], [[3, 3], [3, 3]], [[1, 0], [0, 1]], [[5, 2, 5], [2, 7, 2]]])
def test_each_index_leads_to_the_piece_s_device(device_of: list[list[int]]) -> None:
    wanted = np.array(device_of, np.int32)
    ordinals, index = number_devices(wanted)
    assert len(set(ordinals)) == len(ordinals), "a device is there twice"
    assert index.dtype == np.int32
    assert np.array_equal(np.array(ordinals)[index], wanted)
