"""The reader's memory of where pages lie: bounded in time and size, forgetful on request."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pkv._native import LocationCache
from p2pkv.page import LOCATION, Keys, Locations, as_bytes, as_locations


def random_keys(n: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (n, 16), np.uint8)


def locations_of(offsets: NDArray[np.int64], owner: int = 1) -> Locations:
    locations = np.zeros(len(offsets), LOCATION)
    locations["offset"] = offsets
    locations["owner"] = owner
    return locations


def test_what_was_put_is_found_and_nothing_else() -> None:
    cache = LocationCache(1000, 60.0)
    keys, locations = random_keys(128), locations_of(np.arange(128))
    cache.put(keys[:100], as_bytes(locations[:100]))
    found, raw = cache.get(keys)
    assert found.tolist() == [1] * 100 + [0] * 28
    assert as_locations(raw)[:100].tolist() == locations[:100].tolist()
    assert not raw[100:].any()
    assert len(cache) == 100


def test_a_newer_location_replaces_the_older() -> None:
    cache = LocationCache(10, 60.0)
    keys = random_keys(1)
    for offset in (1, 2):
        cache.put(keys, as_bytes(locations_of(np.array([offset]))))
    assert as_locations(cache.get(keys)[1])["offset"].tolist() == [2]
    assert len(cache) == 1


def test_keys_and_owners_are_dropped() -> None:
    cache = LocationCache(1000, 60.0)
    keys = random_keys(30)
    for owner in range(3):
        cache.put(keys[owner::3].copy(), as_bytes(locations_of(np.arange(10), owner)))
    cache.drop_owner(1)
    cache.drop(keys[:1])
    expected = [int(i % 3 != 1 and i != 0) for i in range(30)]
    assert cache.get(keys)[0].tolist() == expected
    assert len(cache) == sum(expected)


def test_nothing_outlives_its_time() -> None:
    cache = LocationCache(10, 0.0)
    keys = random_keys(5)
    cache.put(keys, as_bytes(locations_of(np.arange(5))))
    assert cache.get(keys)[0].tolist() == [0] * 5
    assert len(cache) == 0


def test_it_never_grows_past_its_capacity_and_keeps_the_latest() -> None:
    cache = LocationCache(64, 60.0)
    for seed in range(50):
        keys = random_keys(4, seed)
        cache.put(keys, as_bytes(locations_of(np.arange(4))))
        assert cache.get(keys)[0].all()
    assert len(cache) <= 64


def test_arrays_of_the_wrong_kind_are_refused_by_name() -> None:
    cache = LocationCache(10, 60.0)
    with pytest.raises(ValueError, match="locations"):
        cache.put(random_keys(2), as_bytes(locations_of(np.arange(1))))
    with pytest.raises(ValueError, match="keys"):
        cache.get(np.zeros((1, 8), np.uint8))
