"""Policies: which of the instances that could take a request should. One small class each, with one method."""

from __future__ import annotations

from p2pkv_proxy.policies.base import Choice, Policy
from p2pkv_proxy.policies.cache_aware import CacheAware
from p2pkv_proxy.policies.hashed import ConsistentHash, Session
from p2pkv_proxy.policies.kv_space import KVSpace
from p2pkv_proxy.policies.least_loaded import LeastLoaded
from p2pkv_proxy.policies.power_of_two import PowerOfTwo
from p2pkv_proxy.policies.predicted import Predicted
from p2pkv_proxy.policies.prefix import Prefix
from p2pkv_proxy.policies.random_choice import RandomChoice
from p2pkv_proxy.policies.round_robin import RoundRobin

POLICIES: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
    "session": Session,
    "kv_space": KVSpace,
    "prefix": Prefix,
    "cache_aware": CacheAware,
    "predicted": Predicted,
}
"""By the names that the command line knows. Each side has an object of its own."""

__all__ = ["POLICIES", "Choice", "Policy"]
