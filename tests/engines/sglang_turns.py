"""Conversations of many turns on two SGLang servers, with different storages in turn: run by hand.

``python tests/engines/sglang_turns.py none file mooncake p2pkv`` starts two servers with each (``turns.py``). It prints
where the prompts' tokens came from and how long the first token took, and ends with an error unless all answers are the
same. ``P2PKV_TURNS`` is 10 unless it is set. ``file`` is SGLang's, a folder that both servers have. ``mooncake`` is
Mooncake's store as SGLang has it, over tcp, with a master of its own; it needs ``pip install --no-deps
mooncake-transfer-engine-non-cuda==0.3.13.post1`` in ``.venv-sglang``.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "support"), str(_TESTS / "engines"), str(_TESTS.parent)]

from sglang_prompts import cached, meet  # noqa: E402
from sglang_server import HICACHE, READY_S, SGLangServer, hicache_server, lasting_port  # noqa: E402
from turns import N_TOKENS, TURN_TOKENS, Pair, Seen, Start, compare  # noqa: E402

from cluster import eventually  # noqa: E402
from demo.xpyd.real_engines import SGLang  # noqa: E402

LAYOUT = "page_first_direct"
OPTIONS = [*HICACHE, "--hicache-mem-layout", LAYOUT]
SEGMENT = 128 << 20
"""Bytes for pages that each server of Mooncake's store gives, as p2pkv's servers do."""


def without(folder: Path, undo: ExitStack) -> Pair:
    return ready([SGLangServer(folder / f"none-{i}.log", OPTIONS) for i in (1, 2)], undo)


def with_file(folder: Path, undo: ExitStack) -> Pair:
    options = [*OPTIONS, "--hicache-storage-backend", "file"]
    where = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "pages")}
    return ready([SGLangServer(folder / f"file-{i}.log", options, environment=where) for i in (1, 2)], undo)


def with_mooncake(folder: Path, undo: ExitStack) -> Pair:
    extra = {
        "master_server_address": mooncake_master(folder, undo),
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": SEGMENT,
    }
    options = [*OPTIONS, "--hicache-storage-backend", "mooncake"]
    options += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    return ready([SGLangServer(folder / f"mooncake-{i}.log", options) for i in (1, 2)], undo)


def mooncake_master(folder: Path, undo: ExitStack) -> str:
    """Start the process that knows where Mooncake's objects are; return its address."""
    program = next(SGLang.VENV.glob("lib/python3*/site-packages/mooncake/mooncake_master"))
    program.chmod(0o755)  # wheels lose that, and Mooncake's own starter mends it so
    port = lasting_port()
    options = ["--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    options += ["--metrics_host=127.0.0.1", f"--metrics_port={lasting_port()}"]
    with (folder / "master.log").open("wb") as log:
        master = subprocess.Popen([program, *options], stdout=log, stderr=subprocess.STDOUT)
    undo.callback(master.wait)
    undo.callback(master.kill)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(listens, 30.0)
    return f"127.0.0.1:{port}"


def with_p2pkv(folder: Path, undo: ExitStack) -> Pair:
    join = f"127.0.0.1:{lasting_port()}"
    servers = [
        hicache_server(
            folder / f"{name}.log",
            layout=LAYOUT,
            settings={"node_id": name, "join": [join], "pool_size": "128MiB"},
        )
        for name in ("first", "second")
    ]
    pair = ready(servers, undo)
    meet(*servers)
    return pair


STORAGES: dict[str, Start] = {
    "none": without,
    "file": with_file,
    "mooncake": with_mooncake,
    "p2pkv": with_p2pkv,
}


def ready(servers: list[SGLangServer], undo: ExitStack) -> Pair:
    """Have two servers ended with ``undo``, and return them when they answer."""
    for server in servers:
        undo.callback(server.kill)
    for server in servers:
        server.wait_until_ready()
        # with its first long prompt a machine's first server compiles what names pages, which says nothing of a storage
        server.generate([300] * TURN_TOKENS, 1, timeout=READY_S)
    first, second = servers
    return Pair((partial(ask, first), partial(ask, second)), lambda seen: None)


def ask(server: SGLangServer, prompt: list[int], seen: Seen) -> None:
    """Have ``server`` answer, and note when its first token came and where its prompt's KV was."""
    sampling = {"temperature": 0, "max_new_tokens": N_TOKENS, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    began = time.monotonic()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    lines: list[bytes] = []
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"HTTP {response.status}: {response.read(500)!r}; see {server.log}")
    for line in response:
        if line.startswith(b"data: {"):
            if not lines:
                seen.first_s.append(time.monotonic() - began)
            lines.append(line)
    connection.close()
    answer = json.loads(lines[-1].removeprefix(b"data: "))
    came = cached(answer)
    seen.answers.append(list(answer["output_ids"]))
    seen.tokens.update(
        storage=came["storage"], host=came["host"], device=came["all"] - came["storage"] - came["host"]
    )


if __name__ == "__main__":
    compare(STORAGES, sys.argv[1:] or list(STORAGES), ("device", "host", "storage"))
