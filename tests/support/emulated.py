"""Builds the libraries that stand in for others in tests (native/test/fake_*), with the system's compiler."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")


def build(name: str, *, driver: str = "") -> str:
    """Return the path of the library ``name``, built if there is none yet of these sources and this command.

    ``driver`` is the emulated CUDA driver that it stands on, whose path is compiled in.
    """
    folder = ROOT / "native" / "test" / name
    sources = sorted(folder.glob("*.cc"))
    command = [os.environ.get("CXX", "c++"), *_FLAGS, *([f'-DP2PKV_FAKE_CUDA="{driver}"'] if driver else [])]
    made_of = hashlib.blake2b("\0".join(command).encode(), digest_size=8)
    for path in (*sources, *sorted(folder.glob("*.h"))):
        made_of.update(path.name.encode() + path.read_bytes())
    built = ROOT / "build" / name / f"lib{name}-{made_of.hexdigest()}.so"
    if built.exists():
        return str(built)
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # processes of tests all want it at first: one compiles, the others wait
        if not built.exists():
            fresh = built.with_suffix(f".{os.getpid()}.so")
            subprocess.run([*command, *map(str, sources), "-o", str(fresh), "-ldl"], check=True)
            fresh.rename(built)  # at once: another process may be about to load it
    return str(built)
