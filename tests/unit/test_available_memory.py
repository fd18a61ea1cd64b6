"""How much memory a node may take, as the machine and its control groups of either version say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pkv import Config, ConfigError, Node
from p2pkv.memory import available
from p2pkv.memory.available import Available, available_memory, require_memory

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(mib: int, swap: int = 0) -> dict[str, str]:
    text = f"MemTotal: 99999999 kB\nMemAvailable: {mib * 1024} kB\nSwapFree: {swap * 1024} kB\n"
    return {"proc/meminfo": text}


def test_what_the_machine_has_left_counts_with_its_swap(tmp_path: Path) -> None:
    write(tmp_path, machine(100, swap=20))
    assert available_memory(tmp_path) == Available(120 * MIB, "the machine")


def test_the_tightest_group_above_counts_and_its_page_cache_is_left(tmp_path: Path) -> None:
    write(
        tmp_path,
        machine(900)
        | {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": f"{200 * MIB}",
            "sys/fs/cgroup/pod/memory.current": f"{150 * MIB}",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\nfile {70 * MIB}\nshmem {40 * MIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{120 * MIB}",
        },
    )
    # 50 MiB to the limit, and 30 MiB of cache that is no shared memory
    assert available_memory(tmp_path) == Available(80 * MIB, "the limit of control group /pod")


def test_groups_of_the_first_version_count(tmp_path: Path) -> None:
    write(
        tmp_path,
        machine(900)
        | {
            "proc/self/cgroup": "4:cpu,memory:/job\n3:cpuset:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{512 * MIB}",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{500 * MIB}",
            "sys/fs/cgroup/memory/job/memory.stat": f"total_cache {90 * MIB}\ntotal_shmem {90 * MIB}\n",
        },
    )
    assert available_memory(tmp_path) == Available(12 * MIB, "the limit of control group /job")


def test_a_container_that_sees_only_its_own_group_is_limited_by_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/burstable/pod1/c1\n",
            "sys/fs/cgroup/memory.max": f"{64 * MIB}",
            "sys/fs/cgroup/memory.current": f"{70 * MIB}",
        },
    )
    assert available_memory(tmp_path) == Available(0, "the limit of control group /")


def test_a_kernel_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    require_memory(1 << 60, None)


def test_a_node_that_would_be_killed_says_what_is_left_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Available(300 * MIB, "the limit of control group /pod")
    monkeypatch.setattr("p2pkv.parts.node.available_memory", lambda: left)
    too_large = Config(pool_size="256MiB", buffer_size="64MiB", node_id="n", join=[])
    with pytest.raises(
        ConfigError, match=r"together take 0.31 GiB, and the limit of control group /pod leaves"
    ):
        Node.start(too_large)


def test_this_machine_is_read() -> None:
    found = available.available_memory()
    assert found is not None
    assert found.nbytes > 0
