"""KV events: SGLang's own classes read a node's that calls pages by numbers: part of ``make test-sglang``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from events_of_a_node import check_decoded

from demo.xpyd.real_engines import SGLang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def test_sglang_decodes_what_a_node_sends(tmp_path: Path) -> None:
    environment = {**os.environ, **SGLang.ENVIRONMENT}
    module = "sglang.srt.disaggregation.kv_events"
    check_decoded(SGLang.VENV, module, "numbers", tmp_path, environment=environment)
