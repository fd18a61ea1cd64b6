"""Lets a node close while calls are under way: no call enters afterwards, and memory goes when the last has left.

``with gate:`` stands around every call. It is native, because an exception that a signal's handler raises (Ctrl-C, a
test's time-out) may come between any two steps of Python code: a gate in Python loses count that way, and whoever
closes it waits for ever.
"""

from p2pkv._native import Gate

__all__ = ["Gate"]
