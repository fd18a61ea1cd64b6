"""How a request is handed to a prefill and a decode instance: one module a way, chosen by the instances' ``mode``."""

from __future__ import annotations

from collections.abc import Mapping

from p2pkv.instances.heartbeat import Mode
from p2pkv_proxy.protocols.base import Answer, Protocol
from p2pkv_proxy.protocols.sglang import SGLang
from p2pkv_proxy.protocols.vllm import VLLM, VLLMAddresses

PROTOCOLS: Mapping[Mode, Protocol] = {
    Mode.SGLANG: SGLang(),
    Mode.VLLM: VLLM(),
    Mode.VLLM_ADDRESSES: VLLMAddresses(),
}

__all__ = ["PROTOCOLS", "Answer", "Protocol"]
