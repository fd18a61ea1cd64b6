"""Build and run the native tests under ASan and UBSan, under TSan and as in a wheel; say what became of each.

The last run is there for the tests that break a safeguard on purpose: sanitizers slow the race down so much
that the harm they must see does not happen. ``run.py asan`` (or ``tsan``, ``wheel``) runs one; a further argument
is a filter on the tests' names. In all but one each folder is compiled as one source, which takes a fourth of the time
where nothing is built yet. ``run.py plain`` is for who changes a file and builds again: optimized like a wheel, with
each file by itself and no precompiled headers for the core, so that none leans on what another one includes, and with
all that a debugger wants. ``run.py bare`` builds with the headers of verbs and UCX hidden: it must link, and runs the
tests of what p2pkv says then.
``run.py aarch64`` has Debian's cross compiler build, and qemu run, the tests of what has code of its own for that
architecture, and of the pool above it.
The exit status is 1 if a test has failed, and 3 if there was nothing to run, for it did not build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import zmq

NATIVE = Path(__file__).resolve().parents[1]
BUILD = NATIVE.parent / "build"
SANITIZERS = {
    "asan": "address,undefined",
    "tsan": "thread",
    "wheel": "",
    "plain": "",
    "bare": "",
    "aarch64": "",
}
DID_NOT_BUILD = 3
DEFAULT = ["asan", "tsan", "wheel"]
# Nothing of the bare build is worth optimizing, and nobody debugs what is built to be tested once.
KINDS = {
    "bare": ["-DCMAKE_BUILD_TYPE=Debug"],
    "wheel": ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG"],
    "aarch64": ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O2"],
}
OPTIMIZED = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
# They run one thread, in which there is no race, and are a fourth of the time under TSan. Named, they run there too.
OF_ONE_THREAD = "page_blocks_,verbs_plans_"
FILTERS = {"bare": ["built_without"]}
BARE = ["-DP2PKV_WITH_VERBS=OFF", "-DP2PKV_WITH_UCX=OFF"]
# Tests of regions are not among them: qemu has no mincore, by which they see what is touched.
ON_AARCH64 = [
    "checksum", "codec", "copy_choice", "copy_kernels", "exact_blocks", "page_blocks", "page_blocks_room",
    "page_checks", "page_history", "pool", "pool_kept", "pool_kept_killed", "pool_packing", "pool_races", "pool_room",
    "timings",
]  # fmt: skip
CROSS_COMPILER = "aarch64-linux-gnu-g++"
AARCH64 = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}",
    "-DP2PKV_FOLDERS=base;codec;page;pool",
    f"-DP2PKV_TESTS_OF={';'.join(ON_AARCH64)}",
]
EMULATOR = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"]
OPTIONS = {
    # What looks for leaks guesses where a library's thread_local lies by what __tls_get_addr returns, and takes one
    # address in 256 for a header that is not there (GCC 12): it reads what that says, and dies.
    "ASAN_OPTIONS": "halt_on_error=1:handle_abort=1:detect_stack_use_after_return=1:strict_string_checks=1:"
    "intercept_tls_get_addr=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    # libzmq is not instrumented: TSan sees what it copies, but not what it synchronizes by. And tests that kill the
    # processes they fork may come after others that have left threads.
    "TSAN_OPTIONS": "halt_on_error=1:handle_abort=1:second_deadlock_stack=1:ignore_noninstrumented_modules=1:"
    "die_after_fork=0",
}

# What says why a run failed: a check, a test that hangs, how a process ended, whatever a sanitizer says for itself.
TELLING = re.compile(
    r"^FAILED|^==\d+==|^SUMMARY: |: not so: |: .+ is not |runtime error: |came to no good end"
)
MOST_TELLING_LINES = 15
# The sanitizer's runtime has ended the process, not a finding: seen once with TSan of GCC 12, which wanted 340 TB.
ITS_OWN_END = re.compile(r"Sanitizer failed to allocate")


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
    configure += [*KINDS.get(flavour, OPTIMIZED), f"-DP2PKV_SANITIZE={SANITIZERS[flavour]}"]
    configure += {"bare": BARE, "aarch64": AARCH64}.get(flavour, [])
    configure += ["-DCMAKE_UNITY_BUILD=OFF" if flavour == "plain" else "-DCMAKE_UNITY_BUILD=ON"]
    ninja = find("ninja")
    if flavour == "aarch64":
        for needed in (CROSS_COMPILER, EMULATOR[0]):
            if shutil.which(needed) is None:
                sys.exit(f"{needed} not found; apt-get install g++-aarch64-linux-gnu qemu-user-static")
    if ninja is not None:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    jobs = str(min(4, os.cpu_count() or 1))
    subprocess.run([cmake, "--build", str(folder), "--parallel", jobs], check=True)
    return folder / "p2pkv_native_tests"


def libzmq() -> str:
    """Return the library that pyzmq bundles: production calls the same one."""
    package = Path(zmq.__file__).parent
    found = sorted(package.with_name("pyzmq.libs").glob("libzmq*.so*"))
    if not found:
        sys.exit(f"no libzmq in {package.with_name('pyzmq.libs')}; install pyzmq from its wheel")
    return str(found[0])


def run(program: list[str], arguments: list[str], environment: dict[str, str]) -> tuple[bool, list[str]]:
    """Run the tests and pass on what they print; return whether all passed, and the lines that tell why not.

    Where the sanitizer has ended for a reason of its own, and no test has failed, they are run once more.
    """
    good, telling, is_its_own = run_once(program, arguments, environment)
    if not good and is_its_own and not any(line.startswith(("FAILED", "SUMMARY")) for line in telling):
        print("the sanitizer itself has failed; once more", flush=True)
        good, telling, _ = run_once(program, arguments, environment)
    return good, telling


def run_once(
    program: list[str], arguments: list[str], environment: dict[str, str]
) -> tuple[bool, list[str], bool]:
    """Do so, whatever comes; return also whether the sanitizer itself has failed."""
    telling = []
    is_its_own = False
    with subprocess.Popen(
        [*program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            is_its_own = is_its_own or ITS_OWN_END.search(line) is not None
            if TELLING.search(line):
                telling.append(line.rstrip())
    return process.returncode == 0, telling, is_its_own


def main(arguments: list[str]) -> int:
    """Run every flavour, or the one named first; non-zero if any failed. Why, is said once more at the end."""
    if arguments[:1] in (["-h"], ["--help"]):  # as a filter it would build everything, and run nothing
        print(__doc__)
        return 0
    flavours = [arguments.pop(0)] if arguments and arguments[0] in SANITIZERS else DEFAULT
    jobs = {"P2PKV_TEST_JOBS": str(min(4, os.cpu_count() or 1))}
    environment = jobs | os.environ | OPTIONS | {"P2PKV_TEST_LIBZMQ": libzmq()}
    passed = []
    said = []
    reasons = []
    for flavour in flavours:
        print(f"--- {flavour}", flush=True)
        began = time.monotonic()
        try:
            program = [*(EMULATOR if flavour == "aarch64" else []), str(build(flavour))]
        except subprocess.CalledProcessError as error:
            print(f"native tests: {flavour} did not build: {error}")
            return DID_NOT_BUILD
        built = time.monotonic()
        chosen = arguments or FILTERS.get(flavour, [])
        skipped = {"P2PKV_TEST_SKIP": OF_ONE_THREAD} if flavour == "tsan" and not chosen else {}
        good, telling = run(program, chosen, environment | skipped)
        passed.append(good)
        if not good:
            reasons += [
                f"{flavour}: {line}" for line in telling[-MOST_TELLING_LINES:] or ["nothing that tells why"]
            ]
        said.append(
            f"{flavour} {'ok' if good else 'FAILED'} "
            f"(built in {built - began:.0f} s, ran for {time.monotonic() - built:.0f} s)"
        )
    print("\n".join([*reasons, "native tests: " + ", ".join(said)]))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
