"""Metrics, events, tokens, trace level, profile: through HTTP."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import LiveServer, start
from tiercel.models.tokenizer import tokenizer_from_folder
from tiercel.observability.metric_table import markdown_table
from tiercel.server.metrics import SERVER_FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


def scrape(http: httpx2.Client) -> dict[str, dict[str, float]]:
    """Values by family and by the label that is not the model's name."""
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found.setdefault(sample.name, {})[" ".join(labels)] = sample.value
    return found


def test_every_answer_is_accounted_for(client: OpenAI, http: httpx2.Client) -> None:
    before = scrape(http)
    client.completions.create(model="toy", prompt=["a", "b"], n=2, max_tokens=3, extra_body={"ignore_eos": True})
    stream = client.completions.create(
        model="toy", prompt="c", max_tokens=500, stream=True, extra_body={"ignore_eos": True, "timeout_s": 20}
    )
    next(iter(stream))
    stream.close()
    http.post("/v1/completions", json={"prompt": [], "max_tokens": 3})
    while (after := scrape(http))["tiercel:answers_open"][""]:
        pass
    ended = {
        how: after["tiercel:answers_ended_total"][how] - n for how, n in before["tiercel:answers_ended_total"].items()
    }
    assert {how: n for how, n in ended.items() if n} == {"length": 4, "disconnected": 1}
    assert after["tiercel:answers_received_total"][""] == sum(after["tiercel:answers_ended_total"].values())
    engines = {how: after["tiercel:requests_total"][how] - n for how, n in before["tiercel:requests_total"].items()}
    assert {how: n for how, n in engines.items() if n} == {"length": 4, "abort": 1}
    responses = {
        what: n - before.get("tiercel:http_responses_total", {}).get(what, 0)
        for what, n in after["tiercel:http_responses_total"].items()
    }
    assert responses["/v1/completions 200"] == 2
    assert responses["/v1/completions 400"] == 1
    assert after["tiercel:engine_up"][""] == 1
    assert after["tiercel:kv_slots_used"][""] == 0


def test_the_servers_families_are_documented() -> None:
    assert markdown_table(SERVER_FAMILIES) in (DOCS / "server.md").read_text()


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("mine", [False, True])
def test_events_show_every_round_of_a_request(client: OpenAI, http: httpx2.Client, mine: bool) -> None:
    name = f"watched-{mine}"
    seen: Counter[str] = Counter()
    tokens: list[dict[str, Any]] = []
    drafts: list[dict[str, Any]] = []
    with http.stream("GET", "/events", params={"request_id": f"cmpl-{name}"} if mine else {}) as watching:
        feed = events(watching.iter_lines())
        kind, first = next(feed)
        assert kind == "engine"
        assert first["is_alive"]
        assert first["kv_slots"] == 4096
        answer = client.completions.create(
            model="toy",
            prompt=[5, 5, 5],
            max_tokens=12,
            temperature=0,
            extra_headers={"X-Request-Id": name},
            extra_body={"ignore_eos": True, "spec_metrics": "detailed"},
        )
        for kind, data in feed:
            seen[kind] += 1
            if kind == "step":
                (part,) = data["requests"]
                assert part["request_id"] == f"cmpl-{name}"
                assert sum(data["stage_ms"].values()) == pytest.approx(data["end_ms"] - data["start_ms"])
                tokens += part["tokens"]
                drafts += part.get("drafts", [])
            if kind == "end":
                break
    spec = answer.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert seen["step"] == 1 + spec["num_spec_steps"]  # type: ignore[index]
    assert len(tokens) == 12
    ids = {"tokens": [token["id"] for token in tokens]}
    assert http.post("/detokenize", json=ids).json()["prompt"] == answer.choices[0].text
    assert tokens[0]["source"] == -2
    assert len(drafts) == spec["num_draft_tokens"]  # type: ignore[index]
    assert sum(draft["is_correct"] for draft in drafts) == spec["num_accepted_draft_tokens"]  # type: ignore[index]
    assert {draft["source"] for draft in drafts} <= {-3, 0, 1}
    assert data["completion_tokens"] == 12


def test_tokens_there_and_back(http: httpx2.Client, toy_model: Path) -> None:
    tokenizer = tokenizer_from_folder(toy_model)
    found = http.post("/tokenize", json={"prompt": "the thé", "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode("the thé")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "the thé"}
    chat = [{"role": "user", "content": "hi"}]
    assert http.post("/tokenize", json={"messages": chat}).json()["tokens"] == tokenizer.encode_chat(chat)
    for body in ({"tokens": [-1]}, {"tokens": [259]}, {"tokens": ["1"]}):
        answer = http.post("/detokenize", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("tokens")
    assert http.post("/tokenize", json={}).json()["error"]["param"] == "prompt"


def test_what_was_not_asked_for_at_start_is_refused(http: httpx2.Client) -> None:
    assert http.get("/version").json()["version"]
    answer = http.post("/set_trace_level", params={"level": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "level"
    assert "--enable-trace" in answer.json()["error"]["message"]
    assert http.get("/set_trace_level", params={"level": 4}).json()["error"]["param"] == "level"
    answer = http.post("/start_profile")
    assert answer.status_code == 400
    assert "--profile-dir" in answer.json()["error"]["message"]


def test_a_key_traces_a_profile_and_no_events(toy_options: list[str], tmp_path: Path) -> None:
    spans = tmp_path / "spans.jsonl"
    options = ["--api-key", "sesame", "--profile-dir", str(tmp_path), "--enable-trace", "--otlp-file", str(spans)]
    server: LiveServer = start(*toy_options, *options, "--no-events", "--cors-origin", "http://page.example")
    key = {"Authorization": "Bearer sesame"}
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        denied = http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
        assert (denied.status_code, denied.json()["error"]["code"]) == (401, "invalid_api_key")
        assert http.get("/events", headers=key).status_code == 403
        page = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
        assert http.options("/v1/completions", headers=page).headers["access-control-allow-origin"] == page["Origin"]
        assert http.post("/stop_profile", headers=key).status_code == 400
        assert http.post("/start_profile", headers=key).status_code == 200
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        headers = key | {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        assert http.post("/v1/completions", headers=headers, json=body).status_code == 200
        profile = json.loads(Path(http.post("/stop_profile", headers=key).json()["path"]).read_text())
        assert profile["traceEvents"]
        assert http.get("/set_trace_level", params={"level": 0}, headers=key).json() == {"level": 0}
        assert http.post("/v1/completions", headers=key, json=body).status_code == 200
    server.process.terminate()
    assert server.process.wait(10) == 0
    server.end()
    exported = [json.loads(line) for line in spans.read_text().splitlines()]
    found = [s for line in exported for r in line["resourceSpans"] for p in r["scopeSpans"] for s in p["spans"]]
    assert {span["traceId"] for span in found if span["name"] != "batch_step"} == {trace_id}
