"""A trace file for people: Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

One process; track 0 is the engine, each request has a track of its own. Counters show batch size, KV slots and acceptance;
an arrow leads from the draft extend that made the drafts to the verify that checked them.
"""

import json
from pathlib import Path
from typing import Any

from tiercel.core.batch import RequestRound, StepRecord
from tiercel.core.errors import UserError
from tiercel.observability.records import RequestRecord
from tiercel.observability.req_time_stats import ReqTimeStats

PROCESS, ENGINE_TRACK = 1, 0


class PerfettoSink:
    """Streams events to ``path``; the file is valid JSON once closed, and an open-ended array (which viewers accept) before."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the trace file {path}: {error.strerror}") from error
        self._tracks: dict[str, int] = {}
        self._num_tracks = 0
        self._born: dict[str, tuple[int, int]] = {}  # a request's last draft extend: its step, and when it began
        self._correct = self._proposed = 0
        name = {"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": "tiercel"}}
        self._file.write("[\n" + json.dumps(name))
        self._name_track(ENGINE_TRACK, "engine")

    def on_step(self, record: StepRecord) -> None:
        args = {"step": record.step, "batch": len(record.rounds) + len(record.extends), "method": record.method}
        self._slice(ENGINE_TRACK, record.mode.value, record.start_ns, record.end_ns, args)
        self._stages(ENGINE_TRACK, record, record.mode.value == "decode")
        self._layers(ENGINE_TRACK, record)
        for extend in record.extends:
            args = {"start": extend.start, "end": extend.end, "step": record.step}
            track = self._track(extend.request_id)
            self._slice(track, "extend", record.verify_start_ns, record.draft_extend_end_ns, args)
            self._born[extend.request_id] = record.step, record.draft_extend_start_ns
        for done in record.rounds:
            self._round(done, record)
        self._counters(record)

    def on_request(self, record: RequestRecord, stats: ReqTimeStats) -> None:
        track = self._track(record.request_id)
        if stats.wait_queue_entry_ns:
            waited = stats.forward_entry_ns or stats.completion_ns or stats.wait_queue_entry_ns
            self._slice(track, "queue", stats.wait_queue_entry_ns, waited, {})
        end = {"finish_reason": record.finish_reason, "completion_tokens": record.completion_tokens}
        self._event("i", track, "finish", stats.completion_ns or stats.created_ns, {"s": "t", "args": end})
        self._born.pop(record.request_id, None)
        del self._tracks[record.request_id]  # an id may come again: it gets a new track
        self._file.flush()

    def close(self) -> None:
        self._file.write("\n]\n")
        self._file.close()

    def _round(self, done: RequestRound, record: StepRecord) -> None:
        track = self._track(done.request_id)
        args = {
            "drafts": list(done.draft_token_ids),
            "layers": list(done.draft_layers),
            "correct": done.num_correct_drafts,
            "bonus": done.bonus_token_id,
            "emitted": done.num_emitted_tokens,
            "context": done.context_len,
        }
        if done.draft_parents:
            args["parents"] = list(done.draft_parents)
        end = record.draft_extend_end_ns
        self._slice(
            track,
            f"round {done.round}: {done.num_correct_drafts}/{len(done.draft_token_ids)}",
            record.draft_start_ns,
            end,
            args,
        )
        self._stages(track, record, True)
        born_step, born_ns = self._born.get(done.request_id, (None, 0))
        if born_step is not None and born_step == done.born_step:  # else the queue was full when that step came
            self._arrow(born_step, born_ns, track, record.verify_start_ns)
        self._born[done.request_id] = record.step, record.draft_extend_start_ns
        self._correct += done.num_correct_drafts
        self._proposed += len(done.draft_token_ids)

    def _stages(self, track: int, record: StepRecord, is_decode: bool) -> None:
        if is_decode:
            self._slice(track, "draft", record.draft_start_ns, record.draft_end_ns, {})
        self._slice(track, "verify" if is_decode else "target", record.verify_start_ns, record.verify_end_ns, {})
        if record.layer_end_ns:
            self._slice(track, "draft extend", record.draft_extend_start_ns, record.draft_extend_end_ns, {})

    def _layers(self, track: int, record: StepRecord) -> None:
        start = record.draft_extend_start_ns
        for layer, end in enumerate(record.layer_end_ns):
            self._slice(track, f"MTP layer {layer + 1}", start, end, {})
            start = end

    def _counters(self, record: StepRecord) -> None:
        values: dict[str, dict[str, float]] = {
            "requests": {"running": len(record.rounds) or len(record.extends), "waiting": record.num_waiting},
            "KV slots used": {"slots": record.kv_slots_used},
        }
        if self._proposed:
            values["acceptance rate"] = {"correct / proposed": self._correct / self._proposed}
        for name, args in values.items():
            self._event("C", ENGINE_TRACK, name, record.end_ns, {"args": args})

    def _arrow(self, born_step: int, start_ns: int, track: int, end_ns: int) -> None:
        flow: dict[str, Any] = {"cat": "draft", "id": f"{track}/{born_step}"}
        self._event("s", track, "drafts", start_ns, flow)
        self._event("f", track, "drafts", end_ns, {**flow, "bp": "e"})

    def _track(self, request_id: str) -> int:
        if request_id not in self._tracks:
            self._num_tracks += 1
            self._tracks[request_id] = self._num_tracks
            self._name_track(self._num_tracks, f"request {request_id}")
        return self._tracks[request_id]

    def _name_track(self, track: int, name: str) -> None:
        for kind, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
            self._write({"name": kind, "ph": "M", "pid": PROCESS, "tid": track, "args": args})

    def _slice(self, track: int, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        self._event("X", track, name, start_ns, {"dur": (end_ns - start_ns) / 1e3, "args": args})

    def _event(self, phase: str, track: int, name: str, ts_ns: int, extra: dict[str, Any]) -> None:
        self._write({"name": name, "ph": phase, "pid": PROCESS, "tid": track, "ts": ts_ns / 1e3, **extra})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" + json.dumps(event))
