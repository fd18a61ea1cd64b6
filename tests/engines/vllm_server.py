"""A real vLLM server on a CPU, with the tiny model, as a process that a test starts, asks and kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import eventually
from demo.xpyd.real_engines import VLLM, lasting_port

READY_S = 420.0
"""Starting takes 25 s alone and minutes beside others on two cores, nearly all of it imports."""
BLOCK = VLLM.BLOCK
p2pkv = VLLM.transfer


class VLLMServer:
    """One server; ``transfer`` is its ``--kv-transfer-config``. With ``routers`` it announces itself to them."""

    def __init__(
        self,
        log: Path,
        transfer: Mapping[str, object] | None = None,
        *,
        block_size: int = BLOCK,
        model: str = "tiny-model",
        environment: Mapping[str, str] | None = None,
        routers: list[str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.port = lasting_port()
        if routers is not None:
            assert transfer is not None
            heard_at = {"routers": routers, "engine_url": f"http://127.0.0.1:{self.port}"}
            settings: Any = transfer["kv_connector_extra_config"]
            transfer = {**transfer, "kv_connector_extra_config": settings | heard_at}
        recipe = VLLM.server(self.port, transfer, block_size=block_size, model=model)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*recipe.command, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **recipe.environment, **(environment or {})},
                cwd=log.parent,  # not the repository: its p2pkv has no native core for this interpreter
                start_new_session=True,  # vLLM is several processes; they go together
            )

    def wait_until_ready(self) -> None:
        """Block until it answers."""

        def answers() -> bool:
            assert self._process.poll() is None, f"the server ended; see the end of its log:\n{self.tail()}"
            try:
                self._get("/health")
            except (urllib.error.URLError, ConnectionError):
                return False
            return True

        eventually(answers, READY_S)

    def complete(
        self,
        tokens: list[int],
        n_tokens: int = 16,
        *,
        params: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the server's answer; ``more`` is asked for besides. Raises ``urllib.error.HTTPError`` for an error."""
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **(more or {}),
        }
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=180) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
        return answer

    def refusal(self, tokens: list[int], *, params: Mapping[str, Any]) -> int:
        """Return the HTTP status of a request that must fail."""
        try:
            answer = self.complete(tokens, params=params)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        raise AssertionError(f"the request succeeded: {answer}")

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Compute a prompt for another server; return the ``kv_transfer_params`` that it needs."""
        answer = self.complete(tokens, 1, params={"do_remote_decode": True, "do_remote_prefill": False})
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    def ids(
        self, tokens: list[int], n_tokens: int = 16, *, params: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids that follow ``tokens``."""
        answer = self.complete(tokens, n_tokens, params=params)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def next_token(self, tokens: list[int], *, params: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Return the likeliest tokens to follow, with their log probabilities."""
        more = {"logprobs": 20, "return_tokens_as_token_ids": True}
        answer = self.complete(tokens, 1, params=params, more=more)
        found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return found

    def count(self, name: str, **labels: str) -> float:
        """Return a counter of its ``/metrics``, summed over the labels that are not given."""
        total = 0.0
        for line in self._get("/metrics").splitlines():
            sample = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if sample and sample[1] == name:
                found = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
                if labels.items() <= found.items():
                    total += float(sample[3])
        return total

    def counted(self, name: str) -> int:
        """Return one of p2pkv's counters."""
        return int(self.count(f"vllm:p2pkv_{name}_total"))

    def prompt_tokens(self, source: str) -> int:
        """Return how many prompt tokens came from ``source``, by vLLM's own count."""
        return int(self.count("vllm:prompt_tokens_by_source_total", source=source))

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def end(self) -> None:
        """Ask it to end, as an operator does; :meth:`kill` it afterwards."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all its processes at once, without a word to anybody. Idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return str(response.read().decode())
