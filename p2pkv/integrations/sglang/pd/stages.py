"""KV between a prefill server whose pipeline stages have some of the layers each, and decode ranks that have all.

Rows are numbered stage by stage, and within a stage as always. SGLang tells decode how many stages prefill has, and not
which layers each of them has: decode counts them as SGLang does, says so with each request, and every stage compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from p2pkv.integrations.sglang.pd.rows import Buffers, Shape


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prefill rank stands in its server's pipeline."""

    stage: int = 0
    n_stages: int = 1
    first_layer: int = 0
    """The number of this stage's first layer among the model's."""

    @property
    def is_last(self) -> bool:
        """Whether the tokens come out here, so that a request's metadata is sent from here."""
        return self.stage == self.n_stages - 1


@dataclass(frozen=True, slots=True)
class Stages:
    """How the layers whose buffers a decode rank has are shared among prefill's stages."""

    layers: tuple[int, ...]
    """How many layers each stage has."""
    n_buffers: int
    """How many buffers all layers have: one a layer, or those of K and then those of V."""

    @property
    def n_layers(self) -> int:
        """How many layers the model has."""
        return sum(self.layers)

    @property
    def of_a_layer(self) -> int:
        """How many buffers a layer has."""
        return self.n_buffers // self.n_layers

    def problem(self) -> str | None:
        """Say why these buffers are not those of these layers, or None. Nothing else may be asked of such stages."""
        if min(self.layers) < 1:
            return f"{self.n_layers} layers are too few for {len(self.layers)} pipeline stages of prefill"
        if self.of_a_layer not in (1, 2) or self.n_buffers % self.n_layers:
            return (
                f"{self.n_buffers} buffers are not K and V of {self.n_layers} layers; draft layers and pipeline "
                "stages of prefill don't go together"
            )
        return None

    def n_before(self, stage: int) -> int:
        """Return the buffers of all stages before one of them."""
        return sum(self.layers[:stage]) * self.of_a_layer

    def which(self, stage: int) -> list[int]:
        """Return the numbers of a stage's buffers."""
        first = sum(self.layers[:stage])
        layers = range(first, first + self.layers[stage])
        return [kind * self.n_layers + layer for kind in range(self.of_a_layer) for layer in layers]

    def parts(self, buffers: Buffers) -> list[Buffers]:
        """Return the buffers of each stage, of a decode rank's."""
        rows = [self.which(stage) for stage in range(len(self.layers))]
        return [Buffers(buffers.addresses[row], buffers.item_nbytes[row], buffers.n_items) for row in rows]

    def part(self, shape: Shape, stage: int) -> Shape:
        """Return what a stage must have alike, of what a decode rank has."""
        return msgspec.structs.replace(shape, pages=tuple(shape.pages[i] for i in self.which(stage)))


def difference(place: Place, n_buffers: int, layers: Sequence[int], shape: Shape) -> str | None:
    """Say why a prefill rank of ``n_buffers`` can't send what a decode rank of ``shape`` wants of it, or None.

    ``layers`` are those of each stage as decode counts them; it names none to a server that has one stage.
    """
    if not layers and place.n_stages == 1:
        return None
    if len(layers) != place.n_stages:
        return f"prefill has {place.n_stages} pipeline stages, and decode counts {len(layers) or 1}"
    stages = Stages(tuple(layers), len(shape.pages))
    problem = stages.problem()
    if problem is not None:
        return problem
    expected = sum(layers[: place.stage])
    if (place.first_layer, n_buffers) != (expected, layers[place.stage] * stages.of_a_layer):
        return (
            f"prefill's stage {place.stage} has {n_buffers // stages.of_a_layer} layers from layer "
            f"{place.first_layer} on, and decode counts {layers[place.stage]} from layer {expected} on; "
            "SGLANG_PP_LAYER_PARTITION must be the same for both servers"
        )
    return None
