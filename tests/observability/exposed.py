"""What an exposition says, read by ``prometheus_client``'s own parser."""

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tiercel.observability.metric_store import MetricStore

Numbers = dict[str, dict[tuple[str, ...], float]]
"""By sample name, then by label values in the order of the label names, ``model_name`` and ``engine`` left out."""


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def numbers(text: str) -> Numbers:
    found: Numbers = {}
    for family in families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            series = found.setdefault(sample.name, {})
            values = tuple(labels[name] for name in sorted(labels))
            assert values not in series, f"{sample.name}{labels} is there twice"
            series[values] = sample.value
    return found


def exposed(store: MetricStore) -> Numbers:
    body, content_type = store.exposition()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return numbers(body.decode())


def total(found: Numbers, name: str) -> float:
    return sum(found.get(name, {}).values())
