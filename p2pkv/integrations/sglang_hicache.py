"""What `--hicache-storage-backend-extra-config` names; the storage is :mod:`p2pkv.integrations.sglang.hicache`."""

from p2pkv.integrations.sglang.hicache import P2PKVHiCache

__all__ = ["P2PKVHiCache"]
