"""What is answered: tokens by instance, in the form that Mooncake's Conductor or that Dynamo's indexer has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pkv.indexer.matches import Match


@dataclass(slots=True)
class Held:
    """What an instance has, in tokens: of each tier the most that one of its ranks has."""

    cpu: int = 0
    disk: int = 0
    external: int = 0
    by_rank: dict[str, int] = field(default_factory=dict)

    def add(self, rank: int, match: Match, block_size: int) -> None:
        """Take in what one rank has."""
        self.cpu = max(self.cpu, match.cpu * block_size)
        self.disk = max(self.disk, match.disk * block_size)
        self.external = max(self.external, match.external * block_size)
        self.by_rank[str(rank)] = match.disk * block_size


def as_conductor(tenant: str, held: Mapping[str, Held]) -> dict[str, object]:
    """Return the answer of Mooncake's Conductor."""
    return {
        tenant: {
            instance: {
                "longest_matched": each.disk,
                "GPU": 0,
                "DP": each.by_rank,
                "CPU": each.cpu,
                "DISK": each.disk,
                "EXTERNAL": each.external,
            }
            for instance, each in held.items()
        }
    }


def as_dynamo(held: Mapping[str, Held]) -> dict[str, object]:
    """Return the answer of Dynamo's indexer, whose flat counts are those of GPU memory: there are none."""
    return {
        "scores": {},
        "frequencies": [],
        "tree_sizes": {},
        "instances": {
            instance: {
                "longest_matched": each.disk,
                "gpu": 0,
                "dp": dict.fromkeys(each.by_rank, 0),
                "cpu": each.cpu,
                "disk": each.disk,
                "external": each.external,
            }
            for instance, each in held.items()
        },
    }
