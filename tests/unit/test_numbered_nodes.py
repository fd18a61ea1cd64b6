"""Processes of an engine that are all given the same settings, each for a node."""

from __future__ import annotations

from pathlib import Path

from p2pkv import Config, Node
from p2pkv.integrations.engine import numbered


def test_their_disks_lie_beside_each_other_though_the_path_ends_with_a_slash(tmp_path: Path) -> None:
    config = Config(
        node_id="n1",
        listen="127.0.0.1:0",
        disk_path=f"{tmp_path}/disk/",
        disk_size="8MiB",
        pool_size="1MiB",
        buffer_size=0,
    )
    (tmp_path / "disk").mkdir(mode=0o700)  # as of a file system that was made for it
    with Node.start(numbered(config, 1, tag="-")), Node.start(config):
        assert (tmp_path / "disk" / "store").is_file()
        assert (tmp_path / "disk-1" / "store").is_file()
