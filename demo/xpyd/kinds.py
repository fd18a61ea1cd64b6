"""The real engines of the xPyD demo: how each one's prefill and decode are told of each other, and of the router."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from demo.xpyd.load import Asked
from demo.xpyd.processes import samples
from demo.xpyd.real_engines import MODEL, VLLM, Recipe, SGLang, lasting_port


class Kind(ABC):
    """One engine. The ports stay, so that an instance that is started again is found where it was."""

    name: ClassVar[str]
    without_prefill: ClassVar[str]
    """What happens to requests then."""

    def __init__(self) -> None:
        self.ports = {name: lasting_port() for name in ("alone", "prefill", "decode")}
        self.join = f"127.0.0.1:{lasting_port()}"

    def url(self, name: str) -> str:
        """Return where ``alone``, ``prefill`` or ``decode`` listens."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def fields(self, asked: Asked) -> Mapping[str, object]:
        """Return what a request's body has besides: always the same answer, and which tokens it is made of."""
        return {"model": MODEL, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    @abstractmethod
    def recipe(self, name: str) -> Recipe:
        """Return how ``alone``, ``prefill`` or ``decode`` is started."""

    @property
    @abstractmethod
    def router_options(self) -> list[str]:
        """How the router is told of the pair."""

    @abstractmethod
    def handed_over(self) -> tuple[float, str]:
        """Return how much KV came from the prefill, by the engine's own count, and that in words."""


class _SGLang(Kind):
    name = "SGLang"
    without_prefill = "SGLang's decodes compute no prompts: clients are told to ask again"

    def __init__(self) -> None:
        super().__init__()
        self._bootstrap_port = lasting_port()
        self._node_ports = {name: lasting_port() for name in ("prefill", "decode")}

    def fields(self, asked: Asked) -> Mapping[str, object]:
        # SGLang refuses to tell the tokens of chats that are streamed: their texts are compared
        fields = super().fields(asked)
        return {**fields, "return_token_ids": not (asked.is_chat and asked.is_stream)}

    def recipe(self, name: str) -> Recipe:
        if name == "alone":
            return SGLang.server(self.ports[name])
        role = SGLang.PREFILL if name == "prefill" else SGLang.DECODE
        node = SGLang.node(self.join, self._node_ports[name])
        return SGLang.server(self.ports[name], SGLang.paired(role, self._bootstrap_port), node)

    @property
    def router_options(self) -> list[str]:
        prefill = f"{self.url('prefill')},id=prefill,bootstrap_port={self._bootstrap_port}"
        return ["--mode", "sglang", "--prefill", prefill, "--decode", f"{self.url('decode')},id=decode"]

    def handed_over(self) -> tuple[float, str]:
        counted = samples(f"http://127.0.0.1:{self._node_ports['decode']}/metrics")
        rows = sum(value for name, value in counted.items() if name.startswith("p2pkv_granted_rows_total"))
        return rows, f"{rows:.0f} pieces of KV came to the decode from the prefill, by p2pkv's count"


class _VLLM(Kind):
    name = "vLLM"
    without_prefill = "vLLM's decodes compute prompts themselves meanwhile"

    def recipe(self, name: str) -> Recipe:
        if name == "alone":
            return VLLM.server(self.ports[name])
        settings = {"join": [self.join], "node_id": name}
        role, policy = ("kv_producer", "fail") if name == "prefill" else ("kv_consumer", "recompute")
        return VLLM.server(self.ports[name], VLLM.transfer(settings, role=role, policy=policy))

    @property
    def router_options(self) -> list[str]:
        pair = [
            "--prefill",
            f"{self.url('prefill')},id=prefill",
            "--decode",
            f"{self.url('decode')},id=decode",
        ]
        return ["--mode", "vllm", *pair]

    def handed_over(self) -> tuple[float, str]:
        counted = samples(f"{self.url('decode')}/metrics")
        tokens = {
            source: sum(
                value
                for name, value in counted.items()
                if name.startswith("vllm:prompt_tokens_by_source_total{") and f'source="{source}"' in name
            )
            for source in ("external_kv_transfer", "local_compute")
        }
        outside, own = tokens["external_kv_transfer"], tokens["local_compute"]
        said = (
            f"of the decode's prompt tokens {outside:.0f} came from the prefill, {own:.0f} it computed itself"
        )
        return outside, f"{said}, by vLLM's count"


ENGINES: Mapping[str, type[Kind]] = {"sglang": _SGLang, "vllm": _VLLM}
