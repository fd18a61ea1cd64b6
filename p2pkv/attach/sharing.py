"""Memory of an attached engine: what its host's node can map is shared with it."""

from __future__ import annotations

from contextlib import ExitStack

from p2pkv.attach.cache import unsupported
from p2pkv.attach.mapped import descriptor_of
from p2pkv.attach.own_host import OwnHost
from p2pkv.memory.registered import Memory
from p2pkv.memory.registrar import Registrar


class SharingRegistrar:
    """Registers memory, and lets the host's node read what it can map. Thread-safe."""

    def __init__(self, registrar: Registrar, own_host: OwnHost) -> None:
        self._registrar = registrar
        self._own_host = own_host

    def register(self, buffer: object, nbytes: int | None, *, is_readable: bool) -> Memory:
        """As :meth:`Registrar.register`; pages of memory that can't be mapped are copied twice when published."""
        self._refuse(is_readable)
        return self._registrar.register(buffer, nbytes, is_readable=False)

    def register_address(self, address: int, nbytes: int, owner: object, *, is_readable: bool) -> Memory:
        """As :meth:`Registrar.register_address`; what ``owner`` has a descriptor of, the node maps."""
        self._refuse(is_readable)
        memory = self._registrar.register_address(address, nbytes, owner, is_readable=False)
        with ExitStack() as undo:  # a node that stands still is waited for, and that may be interrupted
            undo.callback(memory.close)
            fd = descriptor_of(owner, address, nbytes)
            if fd is not None:
                memory.on_close(self._own_host.show(address, nbytes, fd))
            undo.pop_all()
        return memory

    def _refuse(self, is_readable: bool) -> None:
        if is_readable:
            raise unsupported("let peers read its memory")
