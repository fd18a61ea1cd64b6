"""What tests of the HiCache backend share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from p2pkv import Config
from p2pkv.integrations.sglang_hicache import P2PKVHiCache
from p2pkv.metrics import Metrics

PAGES = [f"{i:064x}" for i in range(8)]

Open = Callable[..., P2PKVHiCache]


def storage_config(**changes: Any) -> SimpleNamespace:
    """Return what SGLang 0.5.23 gives a backend."""
    offered = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "model",
        "tp_lcm_size": None,
        "should_split_heads": False,
        "dp_rank": 0,
        "dcp_size": 1,
        "dcp_rank": 0,
        "logical_page_size": None,
        "extra_config": {"backend_name": "p2pkv", "module_path": "m", "class_name": "c", "interface_v1": 1},
    }
    return SimpleNamespace(**offered | changes)


def failed(backend: P2PKVHiCache, operation: str, cause: str) -> float:
    name = f'p2pkv_failed_calls_total{{operation="{operation}",cause="{cause}"}}'
    return backend.node.metrics.counters().get(name, 0)


class FailingNode:
    """A node all of whose calls end in a bug."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()

    def register_address(self, address: int, nbytes: int, owner: object) -> ExitStack:
        return ExitStack()

    def close(self) -> None: ...
    def __getattr__(self, name: str) -> Any:
        def fail(*_: object, **__: object) -> Any:
            raise ZeroDivisionError(f"in {name}")

        return fail
