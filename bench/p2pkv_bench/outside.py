"""The fabrics' own programs, where they are installed: ``ib_read_bw`` of perftest, ``ucx_perftest`` of UCX."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from p2pkv.testing.ports import free_port
from p2pkv_bench.errors import BenchError

_SECONDS = 60.0
_RETRY_S = 0.05


@cache
def measure(transport: str, nbytes: int) -> Mapping[str, float]:
    """Return what each program that belongs to a transport reads, in GB/s, in messages of ``nbytes``.

    Empty where the program or its device is missing. A program that can't be made sense of raises
    :class:`~p2pkv_bench.errors.BenchError`.
    """
    program = {"verbs": "ib_read_bw", "ucx": "ucx_perftest"}.get(transport)
    if program is None or shutil.which(program) is None:
        return {}
    return {program: _PROGRAMS[program](nbytes)}


def _ib_read_bw(nbytes: int) -> float:
    device = min(path.name for path in Path("/sys/class/infiniband").iterdir())
    port = str(free_port())
    command = ["ib_read_bw", "-s", str(nbytes), "-n", "300", "-p", port, "--report_gbits", "-F", "-d", device]
    told = _both_ends(command, [*command, "127.0.0.1"])
    rows = [line.split() for line in told.splitlines() if line.split()[:1] == [str(nbytes)]]
    return _number(command, told, rows, 3) / 8


def _ucx_perftest(nbytes: int) -> float:
    port = str(free_port())
    server = ["ucx_perftest", "-p", port]
    client = [*server, "127.0.0.1", "-t", "ucp_get", "-s", str(nbytes), "-n", "1000", "-w", "100"]
    told = _both_ends(server, client)
    rows = [line.split() for line in told.splitlines() if line.startswith("Final:")]
    return _number(client, told, rows, 6) / 1e3


_PROGRAMS: Mapping[str, Callable[[int], float]] = {
    "ib_read_bw": _ib_read_bw,
    "ucx_perftest": _ucx_perftest,
}


def _both_ends(server: Sequence[str], client: Sequence[str]) -> str:
    """Run a server, and the client as soon as it listens; return what the client said."""
    until = time.monotonic() + _SECONDS
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            while True:
                done = subprocess.run(client, capture_output=True, text=True, timeout=_SECONDS, check=False)
                if done.returncode == 0:
                    return done.stdout
                if running.poll() is not None or time.monotonic() > until:
                    raise BenchError(f"'{' '.join(client)}' failed: {(done.stderr or done.stdout).strip()}")
                time.sleep(_RETRY_S)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"'{' '.join(client)}' took more than {_SECONDS:.0f} seconds") from error
        finally:
            running.kill()


def _number(command: Sequence[str], told: str, rows: Sequence[Sequence[str]], column: int) -> float:
    try:
        return float(rows[-1][column])
    except (IndexError, ValueError) as error:
        raise BenchError(f"'{' '.join(command)}' said something else than it used to: {told}") from error
