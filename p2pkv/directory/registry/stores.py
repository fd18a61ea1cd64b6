"""Which kind of store a URL leads to."""

from __future__ import annotations

from p2pkv.directory.registry.store import Store
from p2pkv.store_url import KUBERNETES, StoreUrl


def make_store(url: StoreUrl, cluster: str) -> Store:
    """Return a way to a cluster's records, for one thread; it connects when it is asked something."""
    # Imported here: most nodes have no store, and start sooner without what speaks HTTP.
    if url.scheme == KUBERNETES:
        from p2pkv.directory.registry.kubernetes import KubernetesStore

        return KubernetesStore(url, cluster)
    from p2pkv.directory.registry.etcd import EtcdStore

    return EtcdStore(url, cluster)
