"""vLLM's own offloading keeps chunks in the cluster: ``make test-vllm``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm_server import VLLMServer

from demo.xpyd.real_engines import ROOT, VLLM, lasting_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).with_name("offload_tiers.py")
N_TOKENS = 700
BLOCK = 32


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_vllms_managers_share_chunks_byte_for_byte(seed: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [VLLM.VENV / "bin" / "python", SCRIPT, str(seed)],
        cwd=tmp_path,  # not the repository: its p2pkv has no native core for this interpreter
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    enough = {"p2p": 50, "host": 20, "computed": 20, "updates of weights": 2}
    assert all(seen[what] > n for what, n in enough.items()), seen


def offloading(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the ``--kv-transfer-config`` of docs/vllm.md, with a worker that copies on a CPU."""
    tier = {"type": "P2PKVTier", "module_path": "p2pkv.integrations.vllm_tier", **settings}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TiersOnCPU",
            "spec_module_path": "tiers_on_cpu",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
        },
    }


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[VLLMServer]]:
    join, path = f"127.0.0.1:{lasting_port()}", str(ROOT / "tools" / "engines" / "vllm_cpu")
    with ExitStack() as stack:
        made = []
        for name in ("first", "second"):
            settings = {"namespace": "tiny", "join": [join], "pool_size": "64MiB", "node_id": name}
            server = VLLMServer(
                tmp_path / f"{name}.log",
                offloading(settings),
                environment={"PYTHONPATH": path},
                # offloading finds what it has by hashes, which vLLM makes with this alone
                options=["--enable-prefix-caching"],
            )
            stack.callback(server.kill)
            server.wait_until_ready()
            made.append(server)
        yield made


def test_what_one_server_offloads_another_one_loads(servers: list[VLLMServer]) -> None:
    first, second = servers
    tokens = [3 + i * 7 % 900 for i in range(N_TOKENS)]
    expected = first.ids(tokens)
    # chunks go on to the tier as vLLM takes further steps
    first.ids(tokens[:40])
    first.ids(tokens[:50])
    assert second.ids(tokens) == expected
    loaded = second.prompt_tokens("external_kv_transfer")
    assert loaded >= (N_TOKENS - 1) // BLOCK * BLOCK, (loaded, first.tail(), second.tail())
    assert second.count("vllm:kv_offload_tiering_read_bytes_total") > 0
    assert first.count("vllm:kv_offload_tiering_write_bytes_total") > 0
