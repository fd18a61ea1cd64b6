"""Which kind of store a URL leads to."""

from __future__ import annotations

from p2pkv.directory.registry.etcd import EtcdStore
from p2pkv.directory.registry.kubernetes import KubernetesStore
from p2pkv.directory.registry.store import Store
from p2pkv.store_url import KUBERNETES, StoreUrl


def make_store(url: StoreUrl, cluster: str) -> Store:
    """Return a way to a cluster's records, for one thread; it connects when it is asked something."""
    return KubernetesStore(url, cluster) if url.scheme == KUBERNETES else EtcdStore(url, cluster)
