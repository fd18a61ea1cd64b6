"""What `--unified-cache-external-linker-config` names; the linker is :mod:`p2pkv.integrations.sglang.linker`."""

from p2pkv.integrations.sglang.linker import P2PKVLinker

__all__ = ["P2PKVLinker"]
