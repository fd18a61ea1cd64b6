"""`python -m demo` as a person runs it: exit status, what it prints, and that no process is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.cluster import WorkerError, running

ROOT = Path(__file__).parents[2]
SECONDS = 240
_MISSED = re.compile(r"reused \d+ tokens of \d+ that were published")


def demo(*arguments: str | bytes) -> subprocess.CompletedProcess[str]:
    """Run it. That pages were missed, which a busy machine may do, is told as what ``make test`` tries once more."""
    done = subprocess.run(
        [sys.executable, "-m", "demo", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert not _MISSED.search(done.stdout), f"not so within what a look-up waits:\n{done.stdout}"
    return done


def test_both_prefill_engines_serve_and_one_is_survived_by_its_pages() -> None:
    done = demo()
    assert done.returncode == 0, done.stdout + done.stderr
    for fact in ("prefill-0", "prefill-1", "decode-0", "GB/s", "time to first token"):
        assert fact in done.stdout
    assert "prefill-1: reused 608 tokens, computed 96" in done.stdout
    assert "prefill-0 is killed" in done.stdout
    assert "prefill-0, started anew: reused 608 tokens that its predecessor computed" in done.stdout
    assert re.search(r"prefill-0 +│ its host +│ mapped +│ +38 ", done.stdout)
    assert done.stdout.count("same output, token for token") == 3
    assert done.stdout.count("same KV, bit for bit") == 3


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "no KV to reuse"),
        ("x", "no KV to reuse"),
        ("--help is 你好 🙂 in [bold]rich[/] markup \\ 'quoted'", "3 whole pages"),
        (b"no text: \xff\xfe\x80", "no KV to reuse"),
        ("long " * 1000, "it has 5,000 bytes; the demo uses the first 1,024 and cuts the rest"),
    ],
    ids=["empty", "one byte", "unicode", "not unicode", "too long"],
)
def test_any_text_is_served(prompt: str | bytes, said: str) -> None:
    done = demo("--small", "--", prompt)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert "prefill-0" in done.stdout
    assert "prefill-1" in done.stdout


def test_spoiled_kv_fails_the_demo() -> None:
    done = demo("--small", "--sabotage")
    assert done.returncode == 1, done.stdout + done.stderr
    for number in (1, 2):
        assert f"prompt {number}: output differs from that of one process alone" in done.stdout
        assert f"prompt {number}: KV differs from that of one process alone" in done.stdout


@pytest.fixture
def started() -> Iterator[subprocess.Popen[str]]:
    """A demo that has got as far as having its members."""
    process = subprocess.Popen(
        [sys.executable, "-m", "demo", "--small"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in a shell's background is started with SIGINT ignored, and would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    with process:
        assert process.stdout is not None
        assert any(line.startswith("members") for line in process.stdout), "the demo ended too early"
        yield process
        process.kill()
    watchdog.cancel()
    watchdog.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_demo(started: subprocess.Popen[str], number: signal.Signals) -> None:
    workers = psutil.Process(started.pid).children()
    assert len(workers) == 4
    started.send_signal(number)
    started.communicate(timeout=SECONDS)
    _gone, alive = psutil.wait_procs(workers, timeout=60.0)
    assert alive == []
    assert started.returncode in (-number, 128 + number)


def test_a_worker_that_dies_is_named(started: subprocess.Popen[str]) -> None:
    for worker in psutil.Process(started.pid).children():
        if "decode-0" in worker.cmdline():
            worker.kill()
    output, _ = started.communicate(timeout=SECONDS)
    assert started.returncode == 1
    assert "decode-0" in output
    assert "exit status -9" in output


def test_a_worker_that_cannot_start_is_quoted() -> None:
    quoted = pytest.raises(WorkerError, match=r"(?s)decode-0 has ended \(exit status 2\).*--no-such-option")
    with quoted, running(["--no-such-option"]) as cluster:
        cluster.start("decode-0")
        cluster.meet(lambda *_: None)
