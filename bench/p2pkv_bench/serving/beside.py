"""Other proxies before the same engine, to compare with: nginx, and SGLang's router from an environment of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from p2pkv.testing.ports import free_port
from p2pkv_bench.errors import BenchError

_START_S = 60.0
_END_S = 10.0
_NGINX = """daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server {engine}; keepalive 512; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 1000000;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@contextmanager
def nginx(command: str, engine: str) -> Iterator[tuple[str, int]]:
    """Run nginx with one worker that passes everything on at once; give its URL and process id."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="p2pkv-bench-") as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(_NGINX.format(folder=folder, engine=engine.removeprefix("http://"), port=port))
        with _process([command, "-p", folder, "-c", str(config)], port) as process:
            yield f"http://127.0.0.1:{port}", process.pid


@contextmanager
def sglang_router(python: str, engine: str) -> Iterator[tuple[str, int]]:
    """Run SGLang's router, which ``python`` has, with round robin over one engine; give its URL and process id."""
    port = free_port()
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", engine, "--policy", "round_robin", "--prometheus-port", str(free_port())]
    command += ["--log-level", "error"]
    with _process(command, port) as process:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + _START_S
        while not _answers(url):
            if time.monotonic() > until:
                raise BenchError("SGLang's router does not find the engine")
            time.sleep(0.2)
        yield url, process.pid


def why_no_nginx(command: str) -> str | None:
    """Return why nginx can't be compared with, or None."""
    return (
        None
        if shutil.which(command)
        else f"no {command}; install Debian's package nginx, or name it (--nginx)"
    )


def _answers(url: str) -> bool:
    body = b'{"model": "m", "prompt": "are you there?", "max_tokens": 1, "stream": true}'
    request = urllib.request.Request(  # noqa: S310 - our own
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3) as page:  # noqa: S310 - our own
            return b"[DONE]" in bytes(page.read())
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _process(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > until:
                raise BenchError(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
