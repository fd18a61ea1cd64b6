"""The router's policies: what every one promises, and what each one is for."""

from __future__ import annotations

from p2pkv_proxy.held import Held, Place
from p2pkv_proxy.prompts import Prompt


def prompt(text: str, *, holdings: Held | None = None, max_tokens: int = 1) -> Prompt:
    asked = Prompt("", [text], None, is_stream=True, max_tokens=max_tokens, n_tokens=len(text) // 4)
    asked.holdings = holdings
    return asked


def test_what_is_held_adds_up_over_owners_and_tiers_and_ends_at_the_first_gap() -> None:
    places = [Place("a"), Place("b"), Place("a", is_on_disk=True), None, Place("c")]
    held = Held.of(places, 16)
    assert (held.total, held.at("a"), held.at("b"), held.at("c")) == (48, 32, 16, 0)
    assert prompt("x" * 400, holdings=held).n_to_compute == 52
    assert prompt("x" * 400).n_to_compute == 100
