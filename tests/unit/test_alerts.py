"""The alerts and the Grafana dashboard name metrics that there are, and each alert says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.metrics import LABELLED, READINGS, Metrics
from p2pkv_proxy.metrics import Metrics as RouterMetrics
from p2pkv_proxy.registry import Registry

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/p2pkv.rules.yaml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/p2pkv.json").read_text())
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def declared() -> set[str]:
    metrics = Metrics()
    names = {*READINGS, *LABELLED}
    names |= {family.name for family in metrics.families()}
    for timing in metrics.timings.all():
        names |= {f"{timing.name}_{part}" for part in ("bucket", "sum", "count")}
    for metric in RouterMetrics(Registry()).registry.collect():
        names.add(f"{metric.name}_total" if metric.type == "counter" else metric.name)
    return names


def expressions() -> Iterator[str]:
    yield from re.findall(r"^ +expr: (.*)$", RULES.read_text(), re.MULTILINE)
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_all_that_is_asked_for_is_declared() -> None:
    asked = {name for text in expressions() for name in re.findall(r"p2pkv_\w+", text)}
    assert len(asked) > 20
    assert asked <= declared()


def test_labels_that_are_asked_for_are_those_of_the_metrics() -> None:
    known = {label for _, labels in LABELLED.values() for label in labels}
    known |= {
        "reason",
        "transport",
        "operation",
        "cause",
        "direction",
        "farthest",
        "source",
        "size_class",
        "le",
        "instance",
    }
    asked = {
        label
        for text in expressions()
        for group in re.findall(r"(?:by|without) \(([^)]*)\)", text)
        for label in group.split(", ")
    }
    assert asked <= known


def test_every_alert_is_in_the_runbook_and_tested_and_nothing_else() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    runbook = (ROOT / "docs/operations.md").read_text().partition("## Alerts")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", runbook, re.MULTILINE) == alerts
    tested = re.findall(r'alertname="(\w+)"', (RULES.parent / "p2pkv.tests.yaml").read_text())
    assert sorted(tested) == sorted(alerts)


def test_what_the_documents_say_to_alert_on_has_an_alert() -> None:
    watching = (ROOT / "docs/operations.md").read_text().partition("## Watching")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)`[^|]* \| alert on", watching, re.MULTILINE)
    assert len(rows) >= 4
    # a read that is repeated with success is damage as well, and no miss
    stand_ins = {'p2pkv_missed_pages_total{reason="checksum"}': "p2pkv_damaged_reads_total"}
    rules = RULES.read_text()
    assert [row for row in rows if stand_ins.get(row, row) not in rules] == []


def test_the_dashboards_panels_are_told_apart_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", RULES.name), ("test", "rules", "p2pkv.tests.yaml")])
def test_promtool_accepts_the_rules_and_their_tests_pass(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {
            "record": f"p2pkv:panel_{i}",
            "expr": text.replace("$__rate_interval", "5m").replace("$instance", ".*"),
        }
        for i, text in enumerate(expressions())
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # YAML has all of JSON
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
