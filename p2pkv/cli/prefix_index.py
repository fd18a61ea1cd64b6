"""``p2pkv prefix-index``: a member that answers which of a prompt's pages lie where, and holds no page itself."""

from __future__ import annotations

import dataclasses

from p2pkv.cli.logs import Format, Level, LogFormat, LogLevel, write_logs
from p2pkv.cli.node import run_until_ended
from p2pkv.cli.outsider import Join
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.config import MIN_POOL_SIZE, Config

DEFAULT_ADDRESS = "127.0.0.1:9400"


def prefix_index(
    join: Join = None,
    config: ConfigFile = None,
    settings: Settings = None,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Say over HTTP how much of a prompt is in the cluster, where and in which tier, until SIGINT or SIGTERM.

    It is a member without room for pages; the setting indexer says where it answers, 127.0.0.1:9400 by default, and
    indexer_token is needed where other machines reach that.
    """
    write_logs(log_level, log_format)
    run_until_ended(without_pages(load(config, settings, **({"join": join} if join else {}))))


def without_pages(config: Config) -> Config:
    """Return ``config`` for a node that answers questions and never publishes."""
    return dataclasses.replace(
        config,
        indexer=config.indexer or DEFAULT_ADDRESS,
        pool_size=MIN_POOL_SIZE,
        disk_path=None,
        disk_size=0,
        drain=0.0,
    )
