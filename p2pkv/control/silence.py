"""Why nobody answers at an address: CURVE refuses a wrong secret without a word, so it has to be looked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from p2pkv.address import split_address

_WAIT_S = 1.0


def why_silent(address: str) -> str:
    """Tell nobody there from somebody who does not let us in; blocks for two seconds at most."""
    try:
        with socket.create_connection(split_address("join", address), timeout=_WAIT_S) as connection:
            connection.settimeout(_WAIT_S)
            greeting = connection.recv(10)
    except TimeoutError:
        return "it accepts no connection, or says nothing on it; a firewall may drop it, or the process be stopped"
    except OSError as error:
        return f"{error.strerror or error}; is a node running there?"
    if greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f":
        return "something speaks ZMQ there, but does not let us in; is secret_file the cluster's?"
    return "what listens there is no p2pkv node"


def tell_why_silent(address: str, tell: Callable[[str], None]) -> None:
    """Call ``tell`` with the reason, from a thread of its own, which ends by itself within two seconds."""
    threading.Thread(target=lambda: tell(why_silent(address)), name="p2pkv-silence", daemon=True).start()
