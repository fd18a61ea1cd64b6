"""An explanation in sentences for people, and as plain values for programs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from itertools import groupby

from p2pkv.explain.asking import RequestCalls
from p2pkv.explain.events import SENTENCES
from p2pkv.explain.explanation import Explanation, Verdict

VERDICTS = {
    Verdict.IN_POOL: "there, in a pool",
    Verdict.ON_DISK: "there, on a disk only",
    Verdict.EVICTED: "not there: it was evicted, and nobody else has it",
    Verdict.RETRACTED: "not there: it was taken back by its publisher",
    Verdict.CLEARED: "not there: its publisher cleared all it had",
    Verdict.BUMPED: "not there: the namespace was bumped since it was published",
    Verdict.DAMAGED: "not there: it was damaged on disk, and dropped",
    Verdict.NOT_TAKEN: "not there: a publish could not store it",
    Verdict.OWNER_GONE: "not there: who had it is no member any more, or was restarted",
    Verdict.OTHER_NAMESPACE: "not there in this namespace, but in another one",
    Verdict.UNKNOWN: "not there: no node that answered has published it, as far as they remember",
}


def lines(explained: Explanation, now: float | None = None) -> Iterator[str]:
    """Yield what is known, the answer first."""
    now = time.time() if now is None else now
    where = f" in namespace {explained.namespace!r}" if explained.namespace else ""
    yield f"page {explained.key!r}{where} is {VERDICTS[explained.verdict]}"
    if explained.page_id:
        epoch = f", epoch {explained.epoch}" if explained.epoch else ""
        yield f"  its id is {explained.page_id}{epoch}"
    for place in explained.places:
        since = (
            f"for {age(now - place.stored_at)}"
            if place.stored_at is not None
            else "for longer than it remembers"
        )
        told = "" if place.is_told else "; no node's part of the directory leads to it yet"
        yield f"  {place.node_id} has it in its {place.medium}, {place.nbytes} bytes, {since}{told}"
    for node_id in explained.owners_gone:
        yield f"  {node_id} had it, and is no member any more, or was restarted since"
    for node_id, difference in explained.elsewhere:
        yield f"  {node_id} has it in namespace {difference.namespace!r}: {difference}"
    if explained.happenings:
        yield "  what became of it:"
    for _, alike in groupby(explained.happenings, lambda one: replace(one, at=0.0)):
        happening, *more = alike
        about = f" ({happening.about})" if happening.about else ""
        before = f", in epoch {happening.epoch}" if happening.epoch != explained.epoch else ""
        again = f"; {len(more)} times more, until {moment(more[-1].at)}" if more else ""
        yield f"    {moment(happening.at)} {happening.node_id}: it {SENTENCES[happening.event]}{about}{before}{again}"
    if explained.silent:
        yield f"  not heard from: {', '.join(explained.silent)}; they may have it, or know"
    n = len(explained.answered)
    yield f"  {n} node{'s' * (n != 1)} answered, who have forgotten nothing since {moment(explained.remembers_since)}"


def request_lines(found: RequestCalls) -> Iterator[str]:
    """Yield what calls found for a request, and why pages that they missed are not there."""
    who = f"{len(found.answered)} node{'s' * (len(found.answered) != 1)} answered"
    if not found.calls:
        yield f"no node remembers a call for request {found.request!r}"
        yield "  nodes with the setting tracing remember the last 4,096 requests that calls named, until they end"
    else:
        yield f"request {found.request!r}"
    for node_id, call in found.calls:
        yield (
            f"  {moment(call.at)} {node_id}: {call.call} of {call.n_pages} pages found {call.n_found}, "
            f"in {1e3 * call.seconds:.1f} ms"
        )
        for page_id in call.missed:
            why = found.missed.get(page_id)
            yield f"    page {page_id.hex()}" + ("" if why is None else f" is {VERDICTS[why.verdict]}")
    if found.silent:
        yield f"  not heard from: {', '.join(found.silent)}; they may have been asked for it"
    yield f"  {who}"


def request_record(found: RequestCalls) -> dict[str, object]:
    """Return it as plain values, for JSON."""
    return {
        "request": found.request,
        "calls": [
            {
                "at": call.at,
                "node_id": node_id,
                "call": call.call,
                "pages": call.n_pages,
                "found": call.n_found,
                "seconds": call.seconds,
                "missed": [page_id.hex() for page_id in call.missed],
            }
            for node_id, call in found.calls
        ],
        "missed": {page_id.hex(): record(why) for page_id, why in found.missed.items()},
        "answered": list(found.answered),
        "silent": list(found.silent),
    }


def record(explained: Explanation) -> dict[str, object]:
    """Return it as plain values, for JSON."""
    return {
        "key": explained.key,
        "namespace": explained.namespace,
        "epoch": explained.epoch,
        "page_id": explained.page_id,
        "verdict": explained.verdict.value,
        "sentence": VERDICTS[explained.verdict],
        "places": [
            {
                "node_id": place.node_id,
                "medium": place.medium,
                "nbytes": place.nbytes,
                "stored_at": place.stored_at,
                "is_told": place.is_told,
            }
            for place in explained.places
        ],
        "owners_gone": list(explained.owners_gone),
        "elsewhere": [
            {
                "node_id": node_id,
                "namespace": difference.namespace,
                "differs": [list(word) for word in difference.words],
            }
            for node_id, difference in explained.elsewhere
        ],
        "events": [
            {
                "at": happening.at,
                "node_id": happening.node_id,
                "event": happening.event.name.lower(),
                "about": happening.about,
                "namespace": happening.namespace,
                "epoch": happening.epoch,
            }
            for happening in explained.happenings
        ],
        "answered": list(explained.answered),
        "silent": list(explained.silent),
        "remembers_since": explained.remembers_since,
    }


def moment(at: float) -> str:
    """Return a time of day, in UTC."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def age(seconds: float) -> str:
    """Return a span of time, to what a reader cares for."""
    seconds = max(0.0, seconds)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "s" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
