"""The engine whose process this is: what is looked up in it, and how its processes are told apart.

Whatever is specific to one engine is found by the ``installed`` module of its folder.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from p2pkv.address import numbered_endpoint, split_address
from p2pkv.config import Config


def find(module: str, name: str, *, is_needed: bool) -> Any | None:
    """Return something of an engine's, or None where the engine isn't installed.

    Another version may lack it: that is an AttributeError if it ``is_needed``, and None if not.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the engine is there, but something it needs is not
        return None
    return getattr(found, name) if is_needed else getattr(found, name, None)


def current_stream(device: object = None) -> int:
    """Return the handle of the CUDA stream that the calling thread's kernels run on."""
    return int(importlib.import_module("torch").cuda.current_stream(device).cuda_stream)


def numbered(config: Config, index: int, *, tag: str) -> Config:
    """Make the settings of process ``index`` of an engine whose processes are given the same, each for a node.

    All but the first add ``tag`` and their number to their id and their folder, and the number to the ports that are
    fixed.
    """
    if index == 0:
        return config
    host, _, port = config.listen.rpartition(":")
    is_fixed = bool(split_address("listen", config.listen)[1])
    return dataclasses.replace(
        config,
        node_id=f"{config.node_id}{tag}{index}",
        listen=f"{host}:{int(port) + index}" if is_fixed else config.listen,
        metrics_port=config.metrics_port and config.metrics_port + index,
        kv_events=numbered_endpoint(config.kv_events, index),
        kv_events_replay=numbered_endpoint(config.kv_events_replay, index),
        indexer=numbered_endpoint(config.indexer, index),
        disk_path=config.disk_path and f"{config.disk_path}{tag}{index}",
    )
