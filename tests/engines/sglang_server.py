"""A real SGLang server on a CPU, with the tiny model, as a process that a test starts, asks and kills."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster import eventually
from demo.xpyd.real_engines import SGLang, lasting_port

ADMIN_KEY = "key-of-the-tests-admin"
STORAGE = "/hicache/storage-backend"
READY_S = 300.0
"""Starting takes 40 to 120 s on two cores, most of it imports."""
HICACHE = shlex.split(
    "--enable-hierarchical-cache --hicache-ratio 2 --hicache-io-backend direct "
    "--hicache-write-policy write_through --hicache-storage-prefetch-policy wait_complete"
)


@dataclass(frozen=True, slots=True)
class Held:
    """What the process of a server that has the KV holds."""

    descriptors: int
    threads: int
    node_threads: int
    """Those that p2pkv named."""
    resident: int
    """Bytes."""


class SGLangServer:
    """One server with the tiny model, started with ``options`` and ``environment`` beside those that all have."""

    def __init__(
        self,
        log: Path,
        options: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        metrics_port: int | None = None,
    ) -> None:
        """``metrics_port`` is that of the server's node, if it has one."""
        self.log = log
        self.port = port or lasting_port()
        self._metrics_port = metrics_port
        recipe = SGLang.server(self.port, options, environment)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                recipe.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **recipe.environment},
                cwd=log.parent,  # not the repository: its p2pkv has no native core for this interpreter
                start_new_session=True,  # SGLang is several processes; they go together
            )

    def wait_until_ready(self) -> None:
        """Block until it answers."""

        def answers() -> bool:
            assert self._process.poll() is None, f"the server ended; see the end of its log:\n{self.tail()}"
            try:
                self._get(self.port, "/model_info")
            except (urllib.error.URLError, ConnectionError):
                return False
            return True

        eventually(answers, READY_S)

    def generate(
        self, tokens: list[int], n_tokens: int = 16, *, timeout: float = 120.0, **more: object
    ) -> dict[str, Any]:
        """Return the ids that follow ``tokens``, and what SGLang says about its caches; ``more`` goes along."""
        sampling = {"temperature": 0, "max_new_tokens": n_tokens, "ignore_eos": True}
        return self._post("/generate", timeout, input_ids=tokens, sampling_params=sampling, **more)

    def update_weights(self, model: Path, version: str | None = None) -> None:
        """Have it serve other weights from here on, which are called ``version``.

        A request that has just been answered is not over for SGLang, which then refuses to flush its caches.
        """

        def is_updated() -> bool:
            told = {"model_path": str(model), "flush_cache": True, "weight_version": version}
            try:
                return bool(self._post("/update_weights_from_disk", 120.0, **told)["success"])
            except urllib.error.HTTPError as error:
                if error.code != 400:
                    raise
                return False

        eventually(is_updated, READY_S)

    def flush(self) -> None:
        """Have it forget what its device and host memory hold, once the last request is over for it as well."""

        def is_flushed() -> bool:
            status, text = self.admin("POST", path="/flush_cache")
            assert status in (200, 400), text
            return status == 200

        eventually(is_flushed, READY_S)

    def attachment(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Return the body that makes p2pkv, with ``settings`` for its node, the storage of a running server."""
        return {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(backend(self._metrics_port, settings)),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_write_policy": "write_through",
        }

    def attach(self, settings: Mapping[str, object]) -> None:
        """Make p2pkv its storage; returns when it is."""
        self._administer("PUT", self.attachment(settings))

    def detach(self) -> None:
        """Take its storage from it; returns when it is gone."""
        self._administer("DELETE")

    def _administer(self, method: str, body: object = None) -> None:
        """Ask until no request is under way: one that has just been answered is not over for SGLang."""

        def is_done() -> bool:
            status, text = self.admin(method, body)
            assert status == 200 or "idle" in text.lower(), text
            return status == 200

        eventually(is_done, 30.0)

    def admin(
        self, method: str, body: object = None, *, path: str = STORAGE, key: str = ADMIN_KEY
    ) -> tuple[int, str]:
        """Ask SGLang's admin API, which is about the storage unless ``path`` says otherwise; return what it says."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def holds(self) -> Held:
        """Return what its scheduler, in which the node lives, holds."""
        processes = psutil.Process(self._process.pid).children(recursive=True)
        (scheduler,) = (each for each in processes if "scheduler" in " ".join(each.cmdline()))
        tasks = list(Path(f"/proc/{scheduler.pid}/task").iterdir())
        names = [(task / "comm").read_text() for task in tasks]
        return Held(
            descriptors=scheduler.num_fds(),
            threads=len(tasks),
            node_threads=sum(name.startswith("p2pkv") for name in names),
            resident=scheduler.memory_info().rss,
        )

    def _post(self, path: str, timeout: float, **body: object) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
        return answer

    def counters(self) -> dict[str, float]:
        """Return the counters of its node."""
        assert self._metrics_port is not None, "the server has no node"
        return self._samples(self._metrics_port)

    def metrics(self) -> dict[str, float]:
        """Return SGLang's own metrics, summed over their labels; only with ``--enable-metrics``."""
        sums: dict[str, float] = {}
        for name, value in self._samples(self.port).items():
            bare = name.partition("{")[0]
            sums[bare] = sums.get(bare, 0.0) + value
        return sums

    def _samples(self, port: int) -> dict[str, float]:
        lines = self._get(port, "/metrics").splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def published_pages(self) -> int:
        """Return how many pages its node has published."""
        return int(self.counters().get("p2pkv_published_pages_total", 0))

    def fetched_pages(self) -> int:
        """Return how many pages its node has fetched from others."""
        prefix = "p2pkv_fetched_pages_total"
        counters = self.counters().items()
        return int(sum(n for name, n in counters if name.startswith(prefix) and "own_pool" not in name))

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """End all its processes at once, without a word to anybody. Idempotent."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait()

    def stop(self) -> None:
        """Halt all its processes where they are; :meth:`resume` lets them go on."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    @staticmethod
    def _get(port: int, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return str(response.read().decode())


def backend(metrics_port: int | None, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the extra configuration that makes p2pkv the storage, with ``settings`` for its node."""
    return {
        "backend_name": "p2pkv",
        "module_path": "p2pkv.integrations.sglang_hicache",
        "class_name": "P2PKVHiCache",
        "interface_v1": 1,
        "metrics_port": metrics_port,
        **settings,
    }


def hicache_server(
    log: Path,
    *,
    layout: str,
    settings: Mapping[str, object],
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> SGLangServer:
    """Start a server whose L3 is p2pkv, with ``settings`` for its node; ``options`` come behind what all have."""
    metrics_port = lasting_port()
    extra = json.dumps(backend(metrics_port, settings))
    options = [*HICACHE, "--hicache-mem-layout", layout, "--hicache-storage-backend", "dynamic", *options]
    options += ["--hicache-storage-backend-extra-config", extra]
    return SGLangServer(log, options, environment=environment, metrics_port=metrics_port)


def unattached_server(log: Path, *, layout: str) -> SGLangServer:
    """Start a server with HiCache and without an L3; :meth:`SGLangServer.attach` gives it one."""
    options = [*HICACHE, "--hicache-mem-layout", layout, "--admin-api-key", ADMIN_KEY]
    return SGLangServer(log, options, metrics_port=lasting_port())


def linker_server(log: Path, settings: Mapping[str, object], options: Sequence[str] = ()) -> SGLangServer:
    """Start a server whose cache linker is p2pkv, with ``settings`` for its node."""
    metrics_port = lasting_port()
    linker = {
        "linker": "P2PKVLinker",
        "linker_module_path": "p2pkv.integrations.sglang_linker",
        "linker_extra_config": {"metrics_port": metrics_port, **settings},
    }
    options = ["--enable-unified-cache-external-linker", *options]
    options += ["--unified-cache-external-linker-backend", "dynamic"]
    options += ["--unified-cache-external-linker-config", json.dumps(linker)]
    return SGLangServer(log, options, metrics_port=metrics_port)
