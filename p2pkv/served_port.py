"""A port that a node has before others hear of it, and serves once it can answer."""

from __future__ import annotations

import threading
from socketserver import TCPServer


class ServedPort:
    """Has the port of ``server`` from the beginning, and serves it from :meth:`start` to :meth:`close`.

    Who connects before waits for that. The thread is called ``thread_name``.
    """

    def __init__(self, server: TCPServer, thread_name: str) -> None:
        self._listening = server
        self._thread = threading.Thread(target=server.serve_forever, name=thread_name, daemon=True)
        self.port = int(server.server_address[1])

    def start(self) -> None:
        """Begin to serve, once."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving and give the port back; waits for the thread. Idempotent."""
        # shutdown() waits for ever if the thread never ran.
        if self._thread.ident is not None:
            self._listening.shutdown()
            self._thread.join()
        self._listening.server_close()
