"""Grafana pages and alert rules: every query parses, and asks for names and labels that are exported.

Queries are read by ``promql-parser``, Prometheus' own grammar; names come from a real exposition, not from the table.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.metrics_core import Metric

from tests.observability.exposed import families
from tiercel.core.config import TraceConfig
from tiercel.core.depths import DepthTable
from tiercel.observability.metrics import EngineView
from tiercel.observability.pipeline import open_pipeline

FOLDER = Path(__file__).parents[2] / "dashboards"
PAGES = ("speculation", "latency", "engine", "trace-pipeline")
TARGET = {"instance", "job"}
"""Labels that Prometheus adds."""
OVER_TIME = {"rate", "increase"}
Series = dict[str, list[dict[str, str]]]
"""Labels of every series, by sample name."""


@pytest.fixture(scope="module")
def exported() -> dict[str, Metric]:
    """A fresh engine's families, by the name of their samples."""
    trace = TraceConfig(metrics=True, enable_trace=True, trace_level=1)
    view = EngineView("multi-layer-eagle", num_steps=3, num_layers=3, depths=DepthTable.of_rows(8, 3))
    pipeline = open_pipeline(trace, "made-up", [InMemorySpanExporter()], view)
    assert pipeline.metrics
    found = families(pipeline.metrics.store.exposition()[0].decode())
    assert pipeline.close()
    return {sample.name: metric for metric in found for sample in metric.samples}


@pytest.fixture(scope="module")
def series(exported: dict[str, Metric]) -> Series:
    return {name: [s.labels for s in metric.samples if s.name == name] for name, metric in exported.items()}


def page(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def read(query: str) -> promql.Expr:
    """Grafana's own variables stand for durations; the page's stand inside strings, where any text may."""
    return promql.parse(query.replace("$__rate_interval", "5m").replace("$__range", "1h"))


def walk(expr: Any, function: str | None = None) -> Iterator[tuple[promql.VectorSelector, str | None]]:
    """Every selector, and the function of time that it stands in."""
    match expr:
        case promql.VectorSelector():
            yield expr, function
        case promql.MatrixSelector():
            yield from walk(expr.vector_selector, function)
        case promql.Call():
            name = expr.func.name
            for argument in expr.args:
                yield from walk(argument, name if name in OVER_TIME else function)
        case promql.BinaryExpr():
            yield from walk(expr.lhs, function)
            yield from walk(expr.rhs, function)
        case promql.AggregateExpr() | promql.ParenExpr():
            yield from walk(expr.expr, function)
        case promql.NumberLiteral():
            return
        case _:
            raise AssertionError(f"{type(expr).__name__} is not looked into")


def labels_left(expr: Any, series: Series) -> set[str]:
    """Labels of a query's answer, as far as our queries go: what is aggregated away is gone, and so is ``by (unknown)``."""
    match expr:
        case promql.VectorSelector():
            return {label for labels in series[expr.name] for label in labels} | TARGET
        case promql.MatrixSelector():
            return labels_left(expr.vector_selector, series)
        case promql.Call():
            left = labels_left(expr.args[-1], series)
            return left - {"le"} if expr.func.name == "histogram_quantile" else left
        case promql.AggregateExpr():
            inner = labels_left(expr.expr, series)
            by = set(expr.modifier.labels) if expr.modifier else set()
            assert by <= inner, f"{expr} groups by labels that are not there"
            return by
        case promql.BinaryExpr():
            sides = [labels_left(side, series) for side in (expr.lhs, expr.rhs)]
            numbers = [isinstance(side, promql.NumberLiteral) for side in (expr.lhs, expr.rhs)]
            if any(numbers):
                return sides[numbers.index(False)]
            if expr.modifier is None:
                assert sides[0] == sides[1], f"the sides of {expr} never meet"
            return sides[0]
        case promql.ParenExpr():
            return labels_left(expr.expr, series)
        case _:
            return set()


def check_all(queries: list[str], exported: dict[str, Metric], series: Series) -> set[str]:
    return {name for query in queries for name in check_query(query, exported, series)}


def check_query(query: str, exported: dict[str, Metric], series: Series) -> set[str]:
    """Names, labels, label values and functions; the names that it asks for."""
    expr, names = read(query), set()
    for selector, function in walk(expr):
        name = selector.name
        assert name in series, f"{name} is not exported"
        names.add(name)
        for matcher in selector.matchers.matchers:
            values = {labels.get(matcher.name) for labels in series[name]}
            assert values != {None} or matcher.name in TARGET, f"{name} has no label {matcher.name}"
            is_variable = matcher.value == f"${matcher.name.removesuffix('_name')}"
            assert is_variable or matcher.value in values, f"{name} never has {matcher.name}={matcher.value}"
        is_gauge = exported[name].type == "gauge"
        assert is_gauge == (function is None), f"{name}: counters are read over time, gauges as they are"
    labels_left(expr, series)
    return names


@pytest.mark.parametrize("name", PAGES)
def test_every_query_asks_for_what_is_exported(name: str, exported: dict[str, Metric], series: Series) -> None:
    for panel in page(name)["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            check_query(target["expr"], exported, series)
            wanted = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
            assert wanted <= labels_left(read(target["expr"]), series), panel["title"]
            assert '{model_name=~"$model",instance=~"$instance"' in target["expr"], (
                "the page's choices count everywhere"
            )


def test_every_alert_asks_for_what_is_exported(exported: dict[str, Metric], series: Series) -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        check_query(rule["expr"], exported, series)
        left = labels_left(read(rule["expr"]), series)
        assert {"model_name", "instance"} <= left
        assert re.fullmatch(r"\d+m", rule["for"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= left, rule["alert"]


def queries() -> list[str]:
    return [target["expr"] for name in PAGES for panel in page(name)["panels"] for target in panel["targets"]]


def test_every_family_is_shown_somewhere(exported: dict[str, Metric], series: Series) -> None:
    shown = check_all(queries(), exported, series)
    assert {metric.name for metric in exported.values()} == {exported[name].name for name in shown}


def test_a_renamed_metric_or_label_breaks_the_build(exported: dict[str, Metric], series: Series) -> None:
    for name in sorted(check_all(queries(), exported, series)):
        without = {other: labels for other, labels in series.items() if other != name}
        with pytest.raises(AssertionError, match=f"{name} is not exported"):
            check_all(queries(), exported, without)
    renamed = {
        n: [{k.replace("position", "pos"): v for k, v in s.items()} for s in found] for n, found in series.items()
    }
    with pytest.raises(AssertionError, match="groups by labels that are not there"):
        check_all(queries(), exported, renamed)
    with pytest.raises(AssertionError, match="never has stage=verified"):
        check_query('rate(tiercel:spec_decode_stage_seconds_sum{stage="verified"}[5m])', exported, series)
    with pytest.raises(AssertionError, match="counters are read over time"):
        check_query("sum(tiercel:preemptions_total)", exported, series)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole(name: str) -> None:
    found = page(name)
    assert found["uid"] == f"tiercel-{name}"
    variables = {variable["name"] for variable in found["templating"]["list"]}
    assert variables == {"datasource", "model", "instance"}
    ids = Counter(panel["id"] for panel in found["panels"])
    assert max(ids.values()) == 1
    taken: Counter[tuple[int, int]] = Counter()
    for panel in found["panels"]:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert max(taken.values()) == 1, "no panel covers another"


def test_variables_ask_for_what_is_exported(series: Series) -> None:
    for name in PAGES:
        for variable in page(name)["templating"]["list"]:
            if variable["type"] == "query":
                query = variable["query"]["query"]
                selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
                metric = promql.parse(selector).name
                assert label in {key for labels in series[metric] for key in labels} | TARGET
