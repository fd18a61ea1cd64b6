"""What ``module_path`` of a secondary tier names; the tier is in :mod:`p2pkv.integrations.vllm_offloading`."""

from p2pkv.integrations.vllm_offloading.tier import P2PKVTier

__all__ = ["P2PKVTier"]
