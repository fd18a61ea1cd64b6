"""Under which names a request's blocks are in the page cache, and what routers are told of them."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.instances.page_report import report_of
from p2pkv.integrations.vllm_connector.groups import NO_BLOCK, Kind
from p2pkv.integrations.vllm_connector.messages import Blocks, Pages, RankDescription
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.request import Request
from p2pkv.integrations.vllm_connector.settings import Instance
from p2pkv.integrations.vllm_connector.weights import Weights, named


class PageNames:
    """Names of the weights that are served when it is asked."""

    def __init__(self, instance: Instance, weights: Weights) -> None:
        self._instance, self._weights = instance, weights

    def of_request(self, request: Request) -> tuple[Pages, ...]:
        """Return all full blocks of a request by their names in the page cache, wherever they lie."""
        hash_size, pages = self._instance.hash_size, []
        for number, group in enumerate(self._instance.groups.each):
            numbers = range(len(request.block_hashes) * hash_size // group.block_size)
            hashes = group.hashes(request.block_hashes, hash_size, numbers)
            pages.append(Pages(number, named(self._weights.name, hashes), []))
        return tuple(pages)

    def of_blocks(self, request: Request, blocks: Sequence[Blocks]) -> tuple[Pages, ...]:
        """Return blocks with their names in the page cache."""
        groups, hash_size = self._instance.groups.each, self._instance.hash_size
        pages = []
        for of_group in blocks:
            numbers = range(of_group.first, of_group.first + len(of_group.ids))
            hashes = groups[of_group.group].hashes(request.block_hashes, hash_size, numbers)
            pages.append(Pages(of_group.group, named(self._weights.name, hashes), of_group.ids))
        return tuple(pages)

    def report(self, request: Request, rank: RankDescription) -> dict[str, object] | None:
        """Return what routers are told of a prompt's pages: the first rank's part of those that all its tokens need."""
        if not self._instance.writes_prefixes:
            return None
        for number, group in enumerate(self._instance.groups.each):
            if group.kind is Kind.FULL and rank.layouts[number]:
                part = Part(0, number, rank.layouts[number])
                n_blocks = request.num_prompt_tokens // group.block_size
                names = [part.key(h) for h in self.of_request(request)[number].hashes[:n_blocks]]
                return report_of(
                    rank.namespace, names, page_size=group.block_size, n_tokens=request.num_prompt_tokens
                )
        return None


def without_holes(pages: Pages) -> Pages:
    """Return pages without those whose blocks were let go before they were full."""
    kept = [i for i, block_id in enumerate(pages.ids) if block_id != NO_BLOCK]
    return Pages(pages.group, [pages.hashes[i] for i in kept], [pages.ids[i] for i in kept])
