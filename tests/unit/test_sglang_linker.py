"""SGLang's cache linker without SGLang: whole nodes in this process, device pools of numpy's arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster import eventually
from device_pools import DeviceEntryFake, offered, transfer
from hicache_backends import PAGES, FailingNode, Open, storage_config
from host_pools import HostPoolFake
from p2pkv import ConfigError
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.integrations.sglang_linker import P2PKVLinker
from p2pkv.testing.ports import free_port
from spans import exported_to

OpenLinker = Callable[..., "Linker"]


class Linker(P2PKVLinker):
    """With what SGLang's base class has."""

    ready: list[Any] = []  # noqa: RUF012 - a test replaces it

    def record_offload_ready(self) -> list[Any]:
        return self.ready


@pytest.fixture
def open_linker() -> Iterator[OpenLinker]:
    """Open linkers of one cluster: ``open(entry, settings={...}, **changes of the storage configuration)``."""
    join = f"127.0.0.1:{free_port()}"
    opened: list[Linker] = []

    def open_one(
        *entries: DeviceEntryFake,
        settings: dict[str, Any] | None = None,
        weights: Weights | None = None,
        agree: Callable[[bool], bool] = bool,
        **changes: Any,
    ) -> Linker:
        config = storage_config(**changes)
        config.extra_config = {"join": join, "pool_size": "4MiB", **(settings or {})}
        named = dict(zip(("kv", "mamba"), entries, strict=False))
        what = offered(named, config, agree)
        linker = Linker(None, None, components={0}, offered=what, weights=weights or Weights("default"))
        opened.append(linker)
        eventually(lambda: all(len(each.node.members()) == len(opened) for each in opened), 10.0)
        return linker

    yield open_one
    for linker in opened:
        linker.close()


def store(linker: Linker, *transfers: Any) -> bool:
    """Have pages stored, and return the answer."""
    assert linker.offload(transfers)
    eventually(lambda: linker.num_completed_offloads() == 1, 10.0)
    return linker.pop_completed_offload()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_go_from_device_to_device_byte_for_byte(open_linker: OpenLinker, kind: str) -> None:
    ours, theirs = DeviceEntryFake(kind=kind), DeviceEntryFake(kind=kind, n_pages=24)
    writer, reader = open_linker(ours), open_linker(theirs)
    sources, targets = [3, 1, 15, 0, 7, 6, 9, 2], [20, 2, 4, 23, 0, 11, 7, 5]
    for seed, page in enumerate(sources):
        ours.fill(page, seed)
    assert store(writer, transfer(PAGES, ours.indices(*sources)))
    assert writer.node.counters()["p2pkv_published_pages_total"] == 8  # one entry a page, whatever its pieces
    assert reader.lookup("r", [transfer(PAGES)]) == list(range(1, 9))
    assert reader.load("r", [transfer(PAGES, theirs.indices(*targets))])
    assert [theirs.content(page) for page in targets] == [ours.content(page) for page in sources]
    untouched = set(range(24)) - set(targets)
    assert not any(any(theirs.content(page)) for page in untouched)
    assert reader.finish_layer_wise_loading(reader.start_layer_wise_loading())


def test_look_ups_and_loads_are_named_after_their_request_in_spans(open_linker: OpenLinker) -> None:
    ours, theirs = DeviceEntryFake(), DeviceEntryFake()
    writer, reader = open_linker(ours), open_linker(theirs, settings={"tracing": True})
    assert store(writer, transfer(PAGES[:2], ours.indices(0, 1)))
    exporter = InMemorySpanExporter()
    with exported_to(exporter):
        assert reader.lookup("request-5", [transfer(PAGES[:2])]) == [1, 2]
        assert reader.load("request-5", [transfer(PAGES[:2], theirs.indices(0, 1))])
        reader.node.exists(["asked by nobody's request"])
        about = [
            (span.name, (span.attributes or {}).get("p2pkv.request"))
            for span in exporter.get_finished_spans()
            if span.name in ("p2pkv.exists", "p2pkv.fetch")
        ]
    assert about == [("p2pkv.exists", "request-5"), ("p2pkv.fetch", "request-5"), ("p2pkv.exists", None)]


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_linker_and_hicache_share_pages(open_backend: Open, kind: str) -> None:
    host = HostPoolFake("page_first_direct", kind=kind)
    backend = open_backend(host, is_mla_model=kind == "mla", weights=Weights("default"))
    device = DeviceEntryFake(kind=kind)
    config = storage_config(is_mla_model=kind == "mla")
    config.extra_config |= {"join": backend.node.address, "pool_size": "4MiB"}
    linker = Linker(
        None, None, components={0}, offered=offered({"kv": device}, config), weights=Weights("default")
    )
    try:
        eventually(lambda: len(backend.node.members()) == 2, 10.0)
        host.fill(3, 1)
        device.fill(5, 2)
        assert backend.batch_set_v1(PAGES[:1], host.indices(3)) == [True]
        assert store(linker, transfer(PAGES[1:2], device.indices(5)))
        assert linker.load("r", [transfer(PAGES[:1], device.indices(0))])
        assert backend.batch_get_v1(PAGES[1:2], host.indices(0)) == [True]
        assert device.content(0) == host.content(3)
        assert host.content(0) == device.content(5)
    finally:
        linker.close()


@pytest.mark.parametrize(
    ("rank", "geometry"),
    [
        ({"model_name": "other"}, {}),
        ({"tp_size": 2, "tp_rank": 1}, {}),
        ({"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
        ({}, {"dtype": "int16"}),
        ({}, {"page_size": 32, "n_pages": 8}),
        ({}, {"heads": 8}),
        ({"extra": {"namespace": "another tenant"}}, {}),
        ({"weights": Weights("v2")}, {}),
    ],
)
def test_whatever_makes_bytes_differ_is_not_found(
    open_linker: OpenLinker, rank: dict[str, Any], geometry: dict[str, Any]
) -> None:
    ours, theirs = DeviceEntryFake(), DeviceEntryFake(**geometry)
    writer = open_linker(ours)
    other = open_linker(theirs, settings=rank.pop("extra", None), **rank)
    assert store(writer, transfer(PAGES[:2], ours.indices(0, 1)))
    assert writer.lookup("r", [transfer(PAGES)]) == [1, 2]
    assert other.lookup("r", [transfer(PAGES)]) == []
    assert not other.load("r", [transfer(PAGES[:2], theirs.indices(0, 1))])


def test_a_load_that_does_not_come_whole_to_every_rank_is_refused(open_linker: OpenLinker) -> None:
    verdicts: list[bool] = []

    def agree(word: bool) -> bool:
        verdicts.append(word)
        return word and len(verdicts) != 2  # the second time another rank says no

    device = DeviceEntryFake()
    linker = open_linker(device, agree=agree)
    assert store(linker, transfer(PAGES[:2], device.indices(0, 1)))
    assert not linker.load("a", [transfer(PAGES[:3], device.indices(4, 5, 6))])
    assert not linker.load("b", [transfer(PAGES[:2], device.indices(4, 5))])
    assert linker.load("c", [transfer(PAGES[:2], device.indices(4, 5))])
    assert verdicts == [False, True, True], "a rank that says nothing would have the others wait"
    assert not linker.cancel_queued_load("a")
    assert linker.cancel_queued_load("c")
    assert not linker.cancel_queued_load("c")


def test_only_whole_prefixes_of_all_pools_count(open_linker: OpenLinker) -> None:
    kv, states = DeviceEntryFake(), DeviceEntryFake(page_size=1)
    linker = open_linker(kv, states)
    tail = transfer(PAGES[1:2], states.indices(7), name="mamba", hit_policy="trailing_pages")
    assert store(linker, transfer(PAGES[:3], kv.indices(0, 1, 2)), tail)
    asked = [transfer(PAGES), transfer(PAGES[:1], name="mamba", hit_policy="trailing_pages")]
    assert linker.lookup("r", asked) == [2], "the state was kept after two pages only"


def test_pages_that_others_have_are_not_stored_again(open_linker: OpenLinker) -> None:
    ours, theirs = DeviceEntryFake(), DeviceEntryFake()
    writer, reader = open_linker(ours), open_linker(theirs)
    assert store(writer, transfer(PAGES[:2], ours.indices(0, 1)))
    assert store(reader, transfer(PAGES[:3], theirs.indices(0, 1, 2)))
    assert reader.node.counters()["p2pkv_published_pages_total"] == 1


def test_pages_of_weights_that_are_replaced_meanwhile_are_not_called_the_new_ones(
    open_linker: OpenLinker,
) -> None:
    is_reached, may_go_on = threading.Event(), threading.Event()

    def synchronize() -> None:
        is_reached.set()
        assert may_go_on.wait(10.0)

    device, weights = DeviceEntryFake(), Weights("v1")
    linker = open_linker(device, weights=weights)
    linker.ready = [SimpleNamespace(synchronize=synchronize)]
    assert linker.offload([transfer(PAGES[:1], device.indices(0))])
    assert is_reached.wait(10.0)
    weights.told("v2", "server")
    may_go_on.set()
    eventually(lambda: linker.num_completed_offloads() == 1, 10.0)
    assert linker.pop_completed_offload()
    assert linker.lookup("r", [transfer(PAGES[:1])]) == []
    weights.told("v1", "server")
    assert linker.lookup("r", [transfer(PAGES[:1])]) == [1]


def test_pages_that_were_read_before_a_bump_are_not_stored_after_it(open_linker: OpenLinker) -> None:
    is_reached, may_go_on = threading.Event(), threading.Event()

    def synchronize() -> None:
        is_reached.set()
        assert may_go_on.wait(10.0)

    device = DeviceEntryFake()
    linker = open_linker(device)
    linker.ready = [SimpleNamespace(synchronize=synchronize)]
    assert linker.offload([transfer(PAGES[:1], device.indices(0))])
    assert is_reached.wait(10.0)
    linker.node.bump()
    may_go_on.set()
    eventually(lambda: linker.num_completed_offloads() == 1, 10.0)
    assert not linker.pop_completed_offload()


def test_a_rank_that_does_not_store_answers_as_often_as_those_that_do(open_linker: OpenLinker) -> None:
    device = DeviceEntryFake(kind="mla")
    rank = {"is_mla_model": True, "is_storage_writer": False, "tp_rank": 1, "tp_size": 2}
    linker = open_linker(device, **rank)
    assert store(linker, transfer(PAGES[:1], device.indices(0)))
    assert linker.lookup("r", [transfer(PAGES[:1])]) == []


def test_errors_are_misses_and_counted() -> None:
    config = storage_config(extra_config={"pool_size": "4MiB"})
    device = DeviceEntryFake()
    linker = Linker(
        None,
        None,
        components={0},
        offered=offered({"kv": device}, config),
        start_node=FailingNode,  # type: ignore[arg-type]
        weights=Weights("default"),
    )
    try:
        assert linker.lookup("r", [transfer(PAGES)]) == []
        assert not linker.load("r", [transfer(PAGES[:1], device.indices(0))])
        linker.node.epoch = 0  # type: ignore[misc]
        assert not store(linker, transfer(PAGES[:1], device.indices(0)))
        failures = linker.node.metrics.counters()
        for operation in ("exists", "get", "set"):
            name = f'p2pkv_failed_calls_total{{operation="{operation}",cause="ZeroDivisionError"}}'
            assert failures[name] == 1
    finally:
        linker.close()


def test_a_reset_waits_for_what_is_read_and_forgets_the_rest(open_linker: OpenLinker) -> None:
    is_reached, may_go_on = threading.Event(), threading.Event()

    def synchronize() -> None:
        is_reached.set()
        assert may_go_on.wait(10.0)

    device = DeviceEntryFake()
    linker = open_linker(device)
    linker.ready = [SimpleNamespace(synchronize=synchronize)]
    for page in range(3):
        assert linker.offload([transfer(PAGES[page : page + 1], device.indices(page))])
    assert is_reached.wait(10.0)
    resetting = threading.Thread(target=linker.reset)
    resetting.start()
    resetting.join(0.05)
    assert resetting.is_alive(), "device memory is still read"
    may_go_on.set()
    resetting.join(10.0)
    assert not resetting.is_alive()
    assert linker.num_completed_offloads() == 0
    linker.ready = []
    assert store(linker, transfer(PAGES[3:4], device.indices(3)))
    assert linker.lookup("r", [transfer(PAGES[3:4])]) == [1]
    assert linker.lookup("r", [transfer(PAGES[:1])]) == []


def test_a_wrong_setting_is_an_error_at_start() -> None:
    config = storage_config(extra_config={"pool_sise": "4MiB"})
    with pytest.raises(ConfigError, match="did you mean 'pool_size'"):
        Linker(None, None, components={0}, offered=offered({"kv": DeviceEntryFake()}, config))
