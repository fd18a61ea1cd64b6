"""How an engine is, asked over its own HTTP address: whether it is well, and what it has to do."""

from __future__ import annotations

import http.client
import logging
import re
from urllib.parse import urlsplit

from p2pkv.instances.heartbeat import Load, State

_log = logging.getLogger(__name__)

_PATIENCE = 2
"""Checks in a row that must fail: a busy engine may answer one late."""
_MAX_PAGE = 4 << 20
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_KV_SHARE = ("vllm:kv_cache_usage_perc",)
_KV_SIZE = re.compile(
    r'^vllm:cache_config_info\{(?=.*\bblock_size="(\d{1,9})")(?=.*\bnum_gpu_blocks="(\d{1,9})")', re.M
)
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")


class EngineCheck:
    """Looks at an engine over HTTP; used by one thread."""

    def __init__(self, url: str, health_path: str, timeout: float) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._connection = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._health_path = health_path
        self._timeout = timeout
        self._n_failed = 0
        self._was_healthy = False
        self.is_draining = False

    def look(self) -> Load:
        """Return how the engine is; blocks for the time-out at most, for each of two pages."""
        is_healthy = self._get(self._health_path) is not None
        self._n_failed = 0 if is_healthy else self._n_failed + 1
        if not is_healthy and not self._was_healthy:
            return Load(State.STARTING)
        if self._n_failed >= _PATIENCE:
            return Load(State.FAILING)
        self._was_healthy = True
        metrics = (self._get("/metrics") or b"").decode(errors="replace") if is_healthy else ""
        state = State.DRAINING if self.is_draining else State.READY
        running, waiting = _total(metrics, _RUNNING), _total(metrics, _WAITING)
        return Load(state, running, waiting, *_kv(metrics))

    def _get(self, path: str) -> bytes | None:
        """Return a page; None unless its status is 200."""
        connection = self._connection(*self._address, timeout=self._timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(_MAX_PAGE)
        except (OSError, http.client.HTTPException) as error:
            _log.debug("the engine does not answer for %s: %s", path, error)
            return None
        finally:
            connection.close()
        return body if response.status == 200 else None


def _kv(metrics: str) -> tuple[int, int]:
    """Return the tokens whose KV an engine holds, and for how many it has room; nothing where it does not say."""
    sizes = [int(size) * int(n_blocks) for size, n_blocks in _KV_SIZE.findall(metrics)]
    shares = [share for share in _values(metrics, _KV_SHARE) if 0.0 <= share <= 1.0]
    if len(sizes) != len(shares) or not sizes:
        return 0, 0
    return round(sum(size * share for size, share in zip(sizes, shares, strict=True))), sum(sizes)


def _total(metrics: str, names: tuple[str, ...]) -> int:
    """Add up the samples of the metrics called so, whatever their labels."""
    total = sum(_values(metrics, names))
    return max(0, int(total)) if total == total and total < 1e9 else 0


def _values(metrics: str, names: tuple[str, ...]) -> list[float]:
    values = []
    for line in metrics.splitlines():
        if line.startswith(names):
            name, _, value = line.rpartition(" ")
            try:
                values += [float(value)] if name.partition("{")[0].strip() in names else []
            except ValueError:
                continue
    return values
