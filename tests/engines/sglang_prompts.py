"""Prompts that tests have real SGLang servers compute, and where their KV came from."""

from __future__ import annotations

from random import Random
from typing import Any

from sglang_server import SGLangServer

from cluster import eventually

PAGE = 16
N_PAGES = 24
PUBLISHED_S = 20.0
NOTICED_S = 30.0
"""The death of a node takes a few seconds to be certain, and longer where cores are scarce."""


def prompt(seed: int) -> list[int]:
    """Return a prompt of :data:`N_PAGES` pages and a few tokens more; the last of them is always computed."""
    random = Random(seed)
    return [random.randrange(300, 4000) for _ in range(N_PAGES * PAGE + 9)]


def cached(answer: dict[str, Any]) -> dict[str, int]:
    """Return how many prompt tokens came from where."""
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return {
        "all": meta["cached_tokens"],
        "host": details.get("host", 0),
        "storage": details.get("storage", 0),
    }


def serve_anew(server: SGLangServer, tokens: list[int]) -> list[int]:
    """Have ``server`` compute a prompt it can't know from anywhere; return when others can fetch its pages."""
    before = server.published_pages()
    answer = server.generate(tokens)
    assert cached(answer)["all"] == 0
    eventually(lambda: server.published_pages() >= before + N_PAGES, PUBLISHED_S)
    return list(answer["output_ids"])


def meet(*servers: SGLangServer) -> None:
    """Wait until the node of each of ``servers`` knows those of all."""
    eventually(lambda: all(s.counters()["p2pkv_members"] == len(servers) for s in servers), NOTICED_S)
