"""The dashboard and the alerts speak of metrics, labels and values that exist, and miss none."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from ec_s3.metric_table import METRICS, Metric

ROOT = Path(__file__).parents[2]
PREFIX = "vllm:ec_s3_"
OUTER_LABELS = {"model_name", "engine", "instance", "le"}
"""Labels that vLLM, Prometheus and histograms add."""

NOT_SHOWN = {"namespace_info"}  # for `ec-s3 prewarm --expect`
"""Metrics left out of the dashboard on purpose."""

FUNCTIONS = {"sum", "min", "max", "count", "rate", "increase", "histogram_quantile"}
WORDS = {"by", "and", "offset"}
COLUMNS = 24


def exposed(metric: Metric) -> set[str]:
    """The names under which Prometheus has a metric."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    return {f"{metric.name}{suffix}" for suffix in suffixes[metric.kind]}


BY_EXPOSED = {name: metric for metric in METRICS.values() for name in exposed(metric)}


@cache
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "deploy/grafana/ec-s3.json").read_text())
    return loaded


@cache
def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def anchor(heading: str) -> str:
    """The anchor that the documentation gives a heading."""
    words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["panels"]
    return found


def expressions() -> list[tuple[str, str]]:
    shown = [(p["title"], t["expr"]) for p in panels() for t in p.get("targets", [])]
    return shown + [(rule["alert"], rule["expr"]) for rule in alerts()]


def metrics_of(expr: str) -> list[Metric]:
    return [BY_EXPOSED[name] for name in re.findall(rf"{PREFIX}([a-z_]+)", expr)]


def grouping_of(expr: str) -> set[str]:
    groups = re.findall(r"by \(([^)]*)\)", expr)
    return {label.strip() for group in groups for label in group.split(",")}


@pytest.mark.parametrize(("where", "expr"), expressions())
def test_expression_is_made_of_what_the_table_has(where: str, expr: str) -> None:
    names = re.findall(rf"{PREFIX}([a-z_]+)", expr)
    assert names, where
    assert set(names) <= BY_EXPOSED.keys()
    for name, selector in re.findall(rf"{PREFIX}([a-z_]+)\{{([^}}]*)\}}", expr):
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
            if label in OUTER_LABELS:
                continue
            allowed = BY_EXPOSED[name].labels[label]
            assert set(value.split("|") if "~" in operator else [value]) <= set(allowed)
    known = OUTER_LABELS.union(*(metric.labels for metric in metrics_of(expr)))
    assert grouping_of(expr) <= known


@pytest.mark.parametrize(("where", "expr"), expressions())
def test_expression_is_well_formed(where: str, expr: str) -> None:
    bare = re.sub(r'"[^"]*"', '""', expr)
    for opening, closing in ("()", "[]", "{}"):
        assert bare.count(opening) == bare.count(closing), where
    assert set(re.findall(r"([a-z_]+)\(", bare)) <= FUNCTIONS
    outside = re.sub(r"\{[^}]*\}|\[[^]]*\]|by \([^)]*\)|vllm:[a-z_0-9]+", " ", bare)
    assert set(re.findall(r"(?<![\w.])[a-z_]+", outside)) <= FUNCTIONS | WORDS
    for name in re.findall(rf"(?:rate|increase)\({PREFIX}([a-z_]+)", expr):
        assert BY_EXPOSED[name].kind != "gauge", "a gauge has no rate"
    for p, name in re.findall(rf"histogram_quantile\(([^,]*).*?{PREFIX}([a-z_]+)", expr):
        assert 0 < float(p) < 1
        assert name.endswith("_bucket")
        assert "le" in grouping_of(expr)


class TestDashboard:
    def test_every_metric_is_shown_or_left_out_on_purpose(self) -> None:
        targets = [t for panel in panels() for t in panel.get("targets", [])]
        shown = {metric.name for t in targets for metric in metrics_of(t["expr"])}
        assert shown.isdisjoint(NOT_SHOWN)
        assert shown | NOT_SHOWN == set(METRICS)

    def test_panels_lie_side_by_side(self) -> None:
        cells = [panel["gridPos"] for panel in panels()]
        for cell in cells:
            assert cell["x"] >= 0
            assert cell["x"] + cell["w"] <= COLUMNS
            assert cell["h"] > 0
        for a, b in combinations(cells, 2):
            apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
            assert apart_x or apart_y, (a, b)
        assert max(cell["y"] + cell["h"] for cell in cells) == sum(
            max(c["h"] for c in cells if c["y"] == y) for y in {cell["y"] for cell in cells}
        ), "there are gaps"

    def test_panels_can_be_told_apart(self) -> None:
        ids = [panel["id"] for panel in panels()]
        assert len(set(ids)) == len(ids)
        titles = [panel["title"] for panel in panels()]
        assert len(set(titles)) == len(titles)
        for panel in panels():
            refs = [target["refId"] for target in panel.get("targets", [])]
            assert len(set(refs)) == len(refs)

    def test_rows_are_what_an_operator_looks_for(self) -> None:
        rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
        assert rows == ["Answers", "Latency", "Bucket", "Host tier", "Uploads", "Health"]

    def test_it_runs_on_any_data_source_and_names_no_machine(self) -> None:
        variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
        assert variables == {"datasource", "model_name", "instance"}
        sources = [panel["datasource"] for panel in panels() if panel["type"] != "row"]
        sources += [t["datasource"] for panel in panels() for t in panel.get("targets", [])]
        assert all(s == {"type": "prometheus", "uid": "${datasource}"} for s in sources)
        assert "__inputs" not in dashboard()

    def test_every_query_obeys_the_variables(self) -> None:
        for panel in panels():
            for target in panel.get("targets", []):
                names = target["expr"].count(PREFIX)
                assert target["expr"].count('model_name=~"$model_name"') == names
                assert target["expr"].count('instance=~"$instance"') == names

    def test_legends_name_labels_that_the_query_keeps(self) -> None:
        for panel in panels():
            for target in panel.get("targets", []):
                labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                if "by (" in target["expr"]:
                    assert labels <= grouping_of(target["expr"]), target
                elif "sum(" not in target["expr"]:
                    assert labels <= OUTER_LABELS
                else:
                    assert not labels

    def test_seconds_and_bytes_are_shown_as_such(self) -> None:
        for panel in panels():
            for target in panel.get("targets", []):
                unit = panel["fieldConfig"]["defaults"].get("unit", "")
                if "histogram_quantile" in target["expr"]:
                    assert unit == "s", panel["title"]
                if "_bytes" in target["expr"]:
                    assert unit in ("bytes", "Bps"), panel["title"]


class TestAlerts:
    def test_they_cover_what_can_go_wrong(self) -> None:
        used = {metric.name for rule in alerts() for metric in metrics_of(rule["expr"])}
        assert used >= {
            *("breaker_open", "corrupt_objects", "remote_requests", "uploads", "hits"),
            *("errors", "serving", "given_up", "switched_off"),
        }

    @pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
    def test_each_says_what_is_wrong_and_what_to_do(self, rule: dict[str, Any]) -> None:
        assert re.fullmatch(r"ECS3[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert all(text.strip() for text in rule["annotations"].values())

    @pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
    def test_each_leads_to_a_heading_of_the_troubleshooting_page(
        self, rule: dict[str, Any]
    ) -> None:
        page = (ROOT / "docs/troubleshooting.md").read_text()
        headings = re.findall(r"^##+ (.*)$", page, re.MULTILINE)
        anchors = {anchor(heading) for heading in headings}
        match = re.search(r"docs/troubleshooting\.md#([\w-]+)$", rule["annotations"]["runbook"])
        assert match is not None
        assert match[1] in anchors

    @pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
    def test_each_names_only_labels_that_it_keeps(self, rule: dict[str, Any]) -> None:
        text = " ".join(rule["annotations"].values())
        named = set(re.findall(r"\{\{ \$labels\.(\w+) \}\}", text))
        kept = grouping_of(rule["expr"]) or OUTER_LABELS.union(
            *(metric.labels for metric in metrics_of(rule["expr"]))
        )
        assert named <= kept

    def test_names_are_unique(self) -> None:
        names = [rule["alert"] for rule in alerts()]
        assert len(set(names)) == len(names)
