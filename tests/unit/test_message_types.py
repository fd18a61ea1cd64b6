"""Types of messages are worked out before threads read them: msgspec lets a second thread see what it has half done."""

from __future__ import annotations

import subprocess
import sys

ONLY_WRITTEN = {
    "p2pkv.directory.routers._Told",
    "p2pkv.instances.heartbeat.Load",
    "p2pkv.kv_events.messages.AllBlocksCleared",
    "p2pkv.kv_events.messages.BlockRemoved",
    "p2pkv.kv_events.messages.BlockStored",
    "p2pkv.kv_events.messages.KVCacheEvent",
    "p2pkv.kv_events.messages.KVEventBatch",
    "p2pkv_proxy.access_log.Entry",
}
"""Nobody reads these here: to write one msgspec works nothing out."""
ONLY_BASES = {"p2pkv.indexer.requests._Asking", "p2pkv.indexer.requests._Scoped"}

# One thread is held where msgspec works out what a want is made of; another one reads a want meanwhile.
TWO_FIRST_WANTS = """
import faulthandler, sys, threading
import msgspec
from p2pkv.integrations.vllm_connector.shares import Share
from p2pkv.integrations.vllm_connector.wants import Want, WantedGroup

faulthandler.enable()

class Unknown(msgspec.Struct):
    groups: tuple[Share, ...] = ()

def reads(read):
    # Whether reading works types out, in which it is held until the others have read.
    begun, over, works_out = threading.Event(), threading.Event(), []
    def trace(frame, event, argument):
        if frame.f_globals.get("__name__") == "msgspec._utils" and frame.f_code.co_name == HELD_IN:
            works_out.append(frame)
            if len(works_out) == N_TYPES:
                begun.set()
                assert over.wait(30)
    def first():
        sys.settrace(trace)
        read()
        begun.set()
    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(30)
    if N_TYPES > 1:
        read()
    over.set()
    thread.join()
    return bool(works_out)

HELD_IN, N_TYPES = "get_class_annotations", 1
assert reads(lambda: msgspec.json.decode(b"{}", type=Unknown)), "msgspec works types out otherwise now: what is held?"
N_TYPES = 2
want = Want(1, 1, 2, (WantedGroup(Share("model.0", 8, 4, 4, 16, "float16"), 0, 3),))
row, wants = want.to_row(), []
assert not reads(lambda: wants.append(Want.from_row(row)))
assert wants == [want, want]
"""

# In a process of its own: tests before this one have read messages.
UNKNOWN_TYPES = """
import gc, importlib, pkgutil
import msgspec, p2pkv, p2pkv_proxy

for package in (p2pkv, p2pkv_proxy):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

class Unknown(msgspec.Struct):
    pass

def unknown(base):
    for kind in base.__subclasses__():
        if not any(type(part).__name__ == "StructInfo" for part in gc.get_referents(kind)):
            yield f"{kind.__module__}.{kind.__qualname__}"
        yield from unknown(kind)

print(*unknown(msgspec.Struct))
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_threads_read_the_first_messages_of_a_type() -> None:
    run(TWO_FIRST_WANTS)


def test_types_that_are_read_are_worked_out_when_their_modules_are_imported() -> None:
    unknown = set(run(UNKNOWN_TYPES).split())
    assert "__main__.Unknown" in unknown, "msgspec keeps what it has worked out elsewhere now"
    ours = {name for name in unknown if name.startswith("p2pkv")}
    assert ours == ONLY_WRITTEN | ONLY_BASES, "decorate what is read with p2pkv.message_types.worked_out"
