"""A transport of p2pkv over plain sockets and threads, in a package of its own: an example of how to write one.

``wire`` says what travels, ``memory`` holds what is registered, ``owner`` answers readers, ``reader`` reads, and
``transport`` puts them behind p2pkv's interface.
"""

from p2pkv_toy.transport import ToyOptions, ToyTransport

__all__ = ["ToyOptions", "ToyTransport"]
