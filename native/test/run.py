"""Build and run the native tests under ASan and UBSan, under TSan, and plain.

The plain run is there for the tests that break a safeguard on purpose: sanitizers slow the race down so much
that the harm they must see does not happen. ``run.py asan`` (or ``tsan``, ``plain``) runs one; a further
argument is a filter on the tests' names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1]
BUILD = NATIVE.parent / "build"
SANITIZERS = {"asan": "address,undefined", "tsan": "thread", "plain": ""}
OPTIONS = {
    "ASAN_OPTIONS": "halt_on_error=1:detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def find(tool: str) -> str | None:
    """Prefer the tool of the running environment, whose ``bin`` need not be on the path."""
    beside = Path(sys.executable).parent / tool
    return str(beside) if beside.exists() else shutil.which(tool)


def build(flavour: str) -> Path:
    """Build the tests with the flavour's sanitizers; return the program."""
    cmake = find("cmake")
    if cmake is None:
        sys.exit("cmake not found; pip install cmake")
    folder = BUILD / f"native-{flavour}"
    configure = [cmake, "-S", str(NATIVE), "-B", str(folder), "-DP2PKV_TESTS=ON"]
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DP2PKV_SANITIZE={SANITIZERS[flavour]}"]
    ninja = find("ninja")
    if ninja is not None:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    jobs = str(min(4, os.cpu_count() or 1))
    subprocess.run([cmake, "--build", str(folder), "--parallel", jobs], check=True)
    return folder / "p2pkv_native_tests"


def main(arguments: list[str]) -> int:
    """Run every flavour, or the one named first; non-zero if any failed."""
    flavours = [arguments.pop(0)] if arguments and arguments[0] in SANITIZERS else list(SANITIZERS)
    failed = []
    for flavour in flavours:
        print(f"--- {flavour}", flush=True)
        program = build(flavour)
        if subprocess.run([str(program), *arguments], env={**os.environ, **OPTIONS}, check=False).returncode:
            failed.append(flavour)
    if failed:
        print(f"native tests failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
