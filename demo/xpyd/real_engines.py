"""How real engines are started on a CPU, with the tiny model that their environment holds: commands and environments.

``make .venv-sglang/.installed`` and ``make .venv-vllm/.installed`` install them; the tests with real engines start
theirs by the same recipes.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
"""The name under which the recipes serve it."""

_OFFLINE = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "no_proxy": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A command and what its environment must have. Run it outside the repository.

    There ``import p2pkv`` would find the sources, which have no native core for the engine's interpreter.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class SGLang:
    """SGLang 0.5.23. The shims stand in for what exists on a GPU only."""

    VENV = ROOT / ".venv-sglang"
    ENVIRONMENT: Mapping[str, str] = {
        "PYTHONPATH": str(ROOT / "tools" / "engines" / "sglang_cpu" / "shims"),
        "SGLANG_USE_CPU_ENGINE": "1",
        **_OFFLINE,
    }
    OPTIONS = shlex.split(
        "--device cpu --host 127.0.0.1 --dtype float32 --attention-backend torch_native "
        "--disable-overlap-schedule --max-total-tokens 4096 --page-size 16 --mem-fraction-static 0.3 "
        "--skip-server-warmup --enable-cache-report"
    )
    BOTH = shlex.split("--disaggregation-transfer-backend p2pkv --hicache-ratio 1 --enable-metrics")
    """Of a prefill and a decode."""
    PREFILL = shlex.split("--disaggregation-mode prefill --chunked-prefill-size 128")
    """Long prompts go over in several chunks."""
    DECODE = shlex.split("--disaggregation-mode decode --disaggregation-decode-retraction-backup cpu_tensor")

    @classmethod
    def server(
        cls, port: int, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Recipe:
        """Return a server, an ordinary one without further ``options``."""
        command = [str(cls.VENV / "bin" / "python"), "-m", "sglang.launch_server", "--port", str(port)]
        command += ["--model-path", str(cls.VENV / "tiny-model"), "--served-model-name", MODEL]
        return Recipe([*command, *cls.OPTIONS, *options], {**cls.ENVIRONMENT, **(environment or {})})

    @classmethod
    def paired(cls, role: Sequence[str], bootstrap_port: int) -> list[str]:
        """Return the options of :attr:`PREFILL` or :attr:`DECODE`, and those that both need."""
        return [*cls.BOTH, *role, "--disaggregation-bootstrap-port", str(bootstrap_port)]

    @staticmethod
    def parallel(n_ranks: int, n_stages: int = 1) -> Recipe:
        """Return the options of a server of so many ranks a stage, and its environment: a CPU for each rank."""
        cpus = sorted(os.sched_getaffinity(0))
        each = "|".join(str(cpus[rank % len(cpus)]) for rank in range(n_ranks * n_stages))
        sizes = ["--tp-size", str(n_ranks), "--pp-size", str(n_stages)]
        return Recipe(sizes, {"SGLANG_CPU_OMP_THREADS_BIND": each})

    @staticmethod
    def node(join: str, metrics_port: int) -> dict[str, str]:
        """Return what the environment says to a server's node."""
        return {"P2PKV_JOIN": join, "P2PKV_METRICS_PORT": str(metrics_port), "SGLANG_HOST_IP": "127.0.0.1"}


class VLLM:
    """vLLM 0.32.0."""

    VENV = ROOT / ".venv-vllm"
    ENVIRONMENT: Mapping[str, str] = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": "0",
        **_OFFLINE,
    }
    OPTIONS = shlex.split(
        f"--host 127.0.0.1 --served-model-name {MODEL} --dtype float32 --enforce-eager --max-model-len 4096 "
        "--max-num-seqs 16 --no-enable-prefix-caching --seed 0 --disable-uvicorn-access-log"
    )
    BLOCK = 32

    @classmethod
    def server(
        cls,
        port: int,
        transfer: Mapping[str, object] | None = None,
        *,
        block_size: int = BLOCK,
        model: str = "tiny-model",
    ) -> Recipe:
        """Return a server of a model that lies in its environment; ``transfer`` is its ``--kv-transfer-config``."""
        command = [str(cls.VENV / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(cls.VENV / model), "--port", str(port), *cls.OPTIONS]
        command += ["--block-size", str(block_size)]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        return Recipe(command, cls.ENVIRONMENT)

    @staticmethod
    def transfer(
        settings: Mapping[str, object], *, role: str = "kv_both", policy: str = "fail"
    ) -> dict[str, object]:
        """Return the ``--kv-transfer-config`` that makes p2pkv the KV connector, with ``settings``."""
        return {
            "kv_connector": "P2PKVConnector",
            "kv_connector_module_path": "p2pkv.integrations.vllm",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": dict(settings),
        }


def lasting_port() -> int:
    """Return a free port that is free in a minute still: below those that the kernel hands out to connections."""
    for port in random.sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no free port")
