"""Uses p2pkv as it is installed beside this Python: imports, README's example, the commands, two processes.

Run by ``make test-wheel`` and by cibuildwheel, from a folder that is not the checkout. Prints what it checked, and
fails at the first thing that is not so.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import re
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

N_PAGES = 32
PATIENCE_S = 60.0
LONGEST = 600
"""Seconds after which something hangs; all of it takes a few."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=Path, help="whose examples are run")
    parser.add_argument(
        "--extras", action="store_true", help="the extras proxy and ucx, and p2pkv-bench, are there too"
    )
    options = parser.parse_args()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    check_module()
    check_examples(options.readme)
    for transport in ("shm", "tcp", *(("ucx",) if options.extras else ())):
        check_two_processes(transport)
    told = check_commands(
        ["p2pkv", "doctor"], ["p2pkv", "--help"], ["p2pkv", "node", "--help"], ["p2pkv", "demo"]
    )
    assert "this p2pkv was built without" not in told, told
    if options.extras:
        check_commands(["p2pkv-proxy", "--help"], ["p2pkv", "bench", "--help"])


def check_module() -> None:
    import p2pkv
    from p2pkv import _native

    here = Path(sysconfig.get_path("platlib"))
    for file in (p2pkv.__file__, _native.__file__):
        assert Path(file).is_relative_to(here), f"{file} is not what was installed into {here}"
    assert _native.HAS_VERBS, "built without verbs"
    # in a process of its own: whichever libucp it finds stays loaded, and there can be no other one beside it
    program = "from p2pkv import _native; print(_native.ucx_missing('libucp.so.0'))"
    missing = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "this p2pkv was built without" not in missing, missing
    print(f"ok: p2pkv {p2pkv.__version__} of {here}, with verbs and ucx", flush=True)


def check_examples(readme: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.S | re.M)
    assert blocks, f"{readme} has no example"
    for block in blocks:
        # a port that is free, so that nobody else's cluster is joined
        example = block.replace("127.0.0.1:7400", f"127.0.0.1:{free_port()}")
        subprocess.run([sys.executable, "-I", "-c", example], check=True)
    print(f"ok: {len(blocks)} examples of {readme.name}", flush=True)


def check_two_processes(transport: str) -> None:
    """Fetch from another process what it published, over ``transport`` and nothing else."""
    import numpy as np

    from p2pkv import Config, Node

    join = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-I", "-c", OWNER, join, transport, str(N_PAGES), json.dumps(OPTIONS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == "published\n", "the other process published nothing"
            config = Config(node_id="reader", join=[join], transports=[transport], transport_options=OPTIONS)
            with Node.start(config) as node:
                rows = np.zeros((N_PAGES, 65536), np.uint8)
                node.register_memory(rows)
                keys = [f"page-{i}" for i in range(N_PAGES)]
                until = time.monotonic() + PATIENCE_S
                while not (found := node.fetch(keys, rows, timeout=30)).all() and time.monotonic() < until:
                    time.sleep(0.1)  # on a busy machine nodes may need some seconds to meet
                assert found.all(), f"{transport}: only {found.sum()} of {N_PAGES} pages came"
                assert (rows == np.arange(1, N_PAGES + 1, dtype=np.uint8)[:, None]).all(), "wrong bytes"
        finally:
            owner.stdin.close()
        assert owner.wait(30) == 0
    print(f"ok: {N_PAGES} pages of another process over {transport}", flush=True)


OPTIONS = {"ucx": {"library": "wheel"}}
"""The wheel's own libucp: a machine's may be one that the transport refuses, as Debian 12's."""

OWNER = """
import json
import sys
import numpy as np
from p2pkv import Config, Node

join, transport, n, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
config = Config(
    node_id="owner", join=[join], transports=[transport], pool_size="16MiB", transport_options=options
)
with Node.start(config) as node:
    rows = np.repeat(np.arange(1, n + 1, dtype=np.uint8)[:, None], 65536, axis=1)
    node.register_memory(rows)
    node.publish([f"page-{i}" for i in range(n)], rows, timeout=30)
    print("published", flush=True)
    sys.stdin.read()
"""


def check_commands(*commands: list[str]) -> str:
    """Run each; return what they printed."""
    told = ""
    for name, *arguments in commands:
        program = Path(sysconfig.get_path("scripts")) / name
        done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"{name} {arguments} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
        print(f"ok: {' '.join([name, *arguments])}", flush=True)
        told += done.stdout
    return told


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


if __name__ == "__main__":
    main()
