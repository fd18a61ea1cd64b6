"""What ``p2pkv doctor`` says of network cards that reach device memory: all of it was tried out, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_cuda import FakeCuda, fake_cuda
from fake_ibverbs import ADDRESS, DMABUF, FakeIbverbs
from p2pkv import transports
from p2pkv.cli.doctor.finding import Verdict
from p2pkv.cli.doctor.transports import examine_transports
from p2pkv.config import Config
from p2pkv.transports.base import Remark, TransportSettings


def _remarks(cards: FakeIbverbs, *, is_on: bool) -> list[Remark]:
    options = {"verbs": {"library": cards.path, "gpudirect": is_on}}
    settings = TransportSettings(options=Config(transport_options=options).options)
    return [remark for remark in transports.remarks("verbs", settings) if remark.what == "GPUDirect"]


def _both(cards: FakeIbverbs, *, is_on: bool) -> list[Remark]:
    remarks = _remarks(cards, is_on=is_on)
    assert len(remarks) == 2, remarks
    return remarks


@pytest.mark.parametrize("is_on", [False, True])
def test_cards_that_bring_device_memory_right_are_said_to(cards: FakeIbverbs, is_on: bool) -> None:
    before = cards.counts()
    found = _remarks(cards, is_on=is_on)
    for what, remark in zip(("cudaMalloc", "cuMemCreate"), found, strict=True):
        assert f"have read 2 MiB of memory of {what}" in remark.says
        assert ("a node does not use it: the option gpudirect" in remark.says) is not is_on
        assert not remark.advice
    # of each kind two memories, known to two cards
    assert cards.counts().dmabufs == before.dmabufs + 8


def test_nothing_is_kept_of_what_was_tried(cards: FakeIbverbs, emulated: FakeCuda) -> None:
    _remarks(cards, is_on=True)
    before = emulated.counts().held
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    _remarks(cards, is_on=True)
    assert emulated.counts().held == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_cards_that_refuse_come_with_what_to_do(cards: FakeIbverbs) -> None:
    cards.refuse(DMABUF)
    for remark in _both(cards, is_on=True):
        assert "as a dmabuf: ibv_reg_dmabuf_mr on emulated0:1: Operation not supported" in remark.says
        assert remark.advice.startswith("a node stages rows of it; dmabufs need the open kernel modules")
        assert "nvidia-peermem" in remark.advice


@pytest.mark.parametrize("way", [DMABUF, ADDRESS])
def test_cards_that_read_something_else_are_found(cards: FakeIbverbs, way: int) -> None:
    if way == ADDRESS:
        cards.refuse(DMABUF)
        cards.refuse(ADDRESS, 0)
    cards.deceive(way)
    for remark in _both(cards, is_on=False):
        assert "reads other bytes than are in the memory" in remark.says
        assert remark.advice.startswith("leave it off, as it is; have PCIe's access control (ACS)")


def test_bytes_that_arrive_wrong_are_found_though_all_went_well(cards: FakeIbverbs) -> None:
    """A card registers the memory, reads the pattern, and later brings something else."""
    cards.spoil_reads()
    for remark in _both(cards, is_on=False):
        assert "have brought other bytes than are in the memory" in remark.says


def test_the_doctor_says_so_of_a_node_that_is_to_use_them(cards: FakeIbverbs) -> None:
    settings = {
        "cuda_library": fake_cuda().path,
        "transports": ["verbs", "tcp"],
        "transport_options": {"verbs": {"library": cards.path, "gpudirect": True}},
    }
    found = list(examine_transports(Config.load(settings, environ={})))
    (tried,) = [finding for finding in found if finding.what == "transport verbs"]
    assert tried.verdict is Verdict.GOOD, tried
    assert [finding.verdict for finding in found if finding.what == "GPUDirect"] == [Verdict.GOOD] * 2
