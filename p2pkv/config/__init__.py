"""A node's settings: what they are, what they may be, and where they come from."""

from p2pkv.config.checks import (
    AUTO,
    COMPRESSION,
    DATA_PORTS,
    DISK_ADMISSION,
    DISK_COMPRESSION,
    DISK_FSYNC,
    DISK_LAYOUTS,
    DISK_WRITE,
    HUGE_PAGES,
    MIN_POOL_SIZE,
)
from p2pkv.config.settings import Config
from p2pkv.config.sources import read_settings

__all__ = [
    "AUTO",
    "COMPRESSION",
    "DATA_PORTS",
    "DISK_ADMISSION",
    "DISK_COMPRESSION",
    "DISK_FSYNC",
    "DISK_LAYOUTS",
    "DISK_WRITE",
    "HUGE_PAGES",
    "MIN_POOL_SIZE",
    "Config",
    "read_settings",
]
