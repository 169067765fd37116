"""The three configuration objects: engine, speculation, tracing. Frozen, checked once, never mutated."""

from dataclasses import dataclass
from pathlib import Path

from tiercel.core.depths import DepthTable
from tiercel.core.errors import UserError

DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("auto", "none", "q8_0")
SPEC_METHODS = ("none", "multi-layer-eagle", "eagle", "eagle3", "standalone", "ngram")
AUTOREGRESSIVE_METHODS = ("eagle", "eagle3", "standalone")
TREE_METHODS = ("multi-layer-eagle", *AUTOREGRESSIVE_METHODS)
TRACE_LEVELS = (0, 1, 2, 3)
NGRAM_MATCH, NGRAM_TOKENS = 2, 7
DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What runs, and with how much room.

    Args:
        model: ``smollm2-135m``, a Hugging Face folder, a ``.gguf`` file, or ``hf:ORG/NAME``.
        dtype: ``auto`` is float32 on a CPU and bfloat16 on a GPU.
        device: ``auto``, ``cpu``, or ``cuda``.
        quantization: ``auto`` runs matrices in the format the checkpoint holds them in where the CPU library can (elsewhere they
            become ``dtype``); ``none`` turns them all into ``dtype``; ``q8_0`` also quantises float matrices, to 8 bits in
            blocks of 32 (CPU library only).
        activation_bits: integers that quantised matrices read their input as, with a scale per 32 values: 8 is fast, 16 is exact
            for practical purposes (float32 results to five digits).
        kv_dtype: of the KV cache: ``float16``, ``float32``, or ``auto``: float16 where quantised matrices read 8-bit integers,
            else ``dtype``.
        enforce_eager: run PyTorch's modules one by one instead of recorded steps.
        kv_tokens: KV slots in the pool, shared by all requests; rounded down to whole pages.
        page_size: KV slots per page.
        max_batch_size: requests that run at once.
        max_prefill_tokens: prompt tokens in one extend step; longer prompts are cut into chunks of this size.
        max_model_len: context limit in tokens; None takes the model's own.
        num_threads: CPU threads; None leaves PyTorch's choice.

    Raises:
        UserError: a value is outside its range; the message names the setting.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "auto"
    activation_bits: int = 8
    kv_dtype: str = "auto"
    enforce_eager: bool = False
    kv_tokens: int = 16384
    page_size: int = 16
    max_batch_size: int = 16
    max_prefill_tokens: int = 512
    max_model_len: int | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("quantization", self.quantization, QUANTIZATIONS)
        one_of("activation_bits", self.activation_bits, (8, 16))
        one_of("kv_dtype", self.kv_dtype, ("auto", "float16", "float32"))
        if self.quantization == "q8_0" and (self.enforce_eager or self.dtype == "bfloat16" or self.device == "cuda"):
            raise UserError(
                "quantization='q8_0' needs the CPU library's recorded steps, which run in float32 on a CPU: drop "
                "enforce_eager, dtype='bfloat16' and device='cuda', or choose quantization 'auto' or 'none'"
            )
        for name in ("kv_tokens", "page_size", "max_batch_size", "max_prefill_tokens"):
            at_least("EngineConfig." + name, getattr(self, name), 1)
        for name in ("max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                at_least("EngineConfig." + name, getattr(self, name), 1)
        if self.kv_tokens < self.page_size:
            raise UserError(f"kv_tokens={self.kv_tokens} holds no page of page_size={self.page_size}: raise kv_tokens")


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Who drafts, and how deep.

    Args:
        method: one of ``SPEC_METHODS``; ``none`` is plain decoding.
        draft: ``smollm2-135m-mtp3`` (shipped), a folder, or ``auto``: the shipped draft that was trained for this target. For
            ``eagle`` its first MTP layer is taken, or it is a published EAGLE head; for ``eagle3`` an EAGLE-3 head. For
            ``standalone`` a model, named as ``EngineConfig.model`` names one.
        num_steps: positions drafted for per round (K): MTP layers in use, each of which drafts one token; None takes every one
            that the draft holds on a GPU, and on a CPU as many as pay (see ``depths``). For ``eagle``, ``eagle3``
            and ``standalone`` how often the draft runs; None stands for 3. 0 decodes plainly under the speculative worker.
        ngram_match: prompt lookup: where so many tokens at the end of a request's text occurred in it before, the draft is
            what followed then, in place of the MTP layers'. 0 turns it off; None stands for 2, and for 0 where nothing drafts.
        ngram_tokens: drafts per round at most from prompt lookup, and never more than tokens agreed. None stands for 7.
        max_verify_rows: rows that one verify may hold, a request's last token and its drafts being its rows: with many requests
            at once each gets fewer drafts, down to none. None sets no limit on a GPU, and one on a CPU where more rows cost more
            than drafts bring. With ``depths`` in force it limits prompt lookup alone.
        min_confidence: a draft is gone on from while the product of the probabilities up to it reaches this, in
            [0, 1]; 0 always goes to the full depth. None stands for 0 on a GPU, and on a CPU for what pays.
        exact_kv: recompute the draft KV rows that were computed from unverified drafts. False leaves them
            stale, as SGLang does for most models; it exists to measure the difference.
        depths: MTP layers and prompt lookup by number of requests at once. None takes what ``tiercel tune`` measured for this
            machine, model and draft, and where there is none, or ``num_steps`` or ``max_verify_rows`` is given, the rule of
            ``max_verify_rows``.
        adaptive: choose the MTP layers in use, 0 included, batch by batch, from what rounds cost here and how often drafts were
            right lately; ``depths`` (or what stands for it) is where it begins. None does so unless ``num_steps``,
            ``max_verify_rows``, ``depths`` or ``topk`` is given. Needs multi-layer-eagle, chains and ``exact_kv``.
        topk: candidates after each draft (SGLang's ``--speculative-eagle-topk``): above 1 drafts are trees of the likeliest
            paths (needs ``exact_kv``). 1 drafts chains.
        num_draft_tokens: drafts per round at most; None stands for ``topk`` times ``num_steps``. In chains it is the number of
            positions. SGLang's ``--speculative-num-draft-tokens`` counts the request's last token too:
            one more.
        tuned: False leaves what ``tiercel tune`` measured out of it.

    Raises:
        UserError: a value is outside its range or contradicts another.
    """

    method: str = "multi-layer-eagle"
    draft: str = "auto"
    num_steps: int | None = None
    exact_kv: bool = True
    max_verify_rows: int | None = None
    ngram_match: int | None = None
    ngram_tokens: int | None = None
    min_confidence: float | None = None
    depths: DepthTable | None = None
    tuned: bool = True
    adaptive: bool | None = None
    topk: int = 1
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        one_of("spec method", self.method, SPEC_METHODS)
        if self.num_steps is not None:
            at_least("num_steps", self.num_steps, 0)
        if self.max_verify_rows is not None:
            at_least("max_verify_rows", self.max_verify_rows, 1)
        for name, minimum in (("ngram_match", 0), ("ngram_tokens", 1)):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), minimum)
        if self.min_confidence is not None and not 0 <= self.min_confidence <= 1:
            raise UserError(f"min_confidence={self.min_confidence} is not allowed: give a number from 0 to 1")
        at_least("topk", self.topk, 1)
        self._check_tree()
        if self.adaptive and (self.method != "multi-layer-eagle" or self.topk > 1 or not self.exact_kv):
            raise UserError(
                "adaptive=True needs method 'multi-layer-eagle', topk=1 and exact_kv=True: drop one or the other"
            )
        unused = {
            "none": ("num_steps", "ngram_match", "ngram_tokens", "depths"),
            "ngram": ("num_steps", "depths"),
            **dict.fromkeys(AUTOREGRESSIVE_METHODS, ("ngram_match", "ngram_tokens", "depths")),
        }
        for name in unused.get(self.method, ()):
            if getattr(self, name):
                raise UserError(f"{name}={getattr(self, name)} contradicts method {self.method!r}: drop one of the two")
        if not self.exact_kv and self.method != "multi-layer-eagle":
            raise UserError(f"exact_kv=False contradicts method {self.method!r}: only multi-layer-eagle can do without")
        if self.method == "ngram" and self.ngram_match == 0:
            raise UserError(
                "ngram_match=0 leaves method 'ngram' nothing to draft from: give at least 1, or method 'none'"
            )

    def _check_tree(self) -> None:
        if self.method not in TREE_METHODS:
            if self.topk > 1 or self.num_draft_tokens is not None:
                raise UserError(f"topk and num_draft_tokens contradict method {self.method!r}: drop them")
            return
        if self.num_draft_tokens is not None:
            at_least("num_draft_tokens", self.num_draft_tokens, 1)
        if self.topk == 1 and self.num_draft_tokens not in (None, self.num_steps):
            raise UserError(
                f"num_draft_tokens={self.num_draft_tokens} contradicts topk=1, with which num_steps={self.num_steps} says "
                "how many drafts there are: drop num_draft_tokens, or give topk of at least 2"
            )
        if self.topk > 1 and not self.exact_kv:
            raise UserError(
                f"topk={self.topk} contradicts exact_kv=False, which keeps a chain's rows: drop one of the two"
            )

    @property
    def lookup(self) -> tuple[int, int]:
        """``ngram_match`` and ``ngram_tokens`` in force; ``(0, 0)`` where prompt lookup is off."""
        is_plain = self.method in ("none", *AUTOREGRESSIVE_METHODS) or self.num_steps == 0
        match = (0 if is_plain else NGRAM_MATCH) if self.ngram_match is None else self.ngram_match
        return (match, self.ngram_tokens or NGRAM_TOKENS) if match else (0, 0)


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What is recorded, and where it goes. Everything is off unless asked for.

    Args:
        enable_trace: make OpenTelemetry spans.
        trace_level: 0 off, 1 important stages, 2 draft and verify, 3 draft extend and single MTP layers.
        otlp_endpoint: collector address; None takes OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, and
            without them exports no span over the network.
        otlp_protocol: ``grpc`` or ``http/protobuf``; an endpoint from the environment has its protocol from there too.
        otlp_file: OTLP-JSON lines of every finished span.
        trace_out: Chrome/Perfetto JSON file, one track per request plus the engine's.
        records_out: folder for ``requests.jsonl`` and ``rounds.jsonl``.
        records_max_mb: a record file of so many megabytes (10**6 bytes) is followed by the next; None never begins another.
        trace_legacy_names: give root spans the older ``gen_ai.*`` names beside the current ones, which dashboards made for vLLM
            and SGLang query.
        metrics: count for Prometheus (``LLM.metrics_text``).
        metrics_port: show the metrics on this port of 127.0.0.1, too; 0 takes a free one.
        metrics_vllm_names: export families that vLLM has under its names as well.

    Raises:
        UserError: a value is outside its range or contradicts another.
    """

    enable_trace: bool = False
    trace_level: int = 3
    otlp_endpoint: str | None = None
    otlp_protocol: str = "grpc"
    otlp_file: Path | None = None
    trace_out: Path | None = None
    records_out: Path | None = None
    records_max_mb: int | None = None
    trace_legacy_names: bool = False
    metrics: bool = False
    metrics_port: int | None = None
    metrics_vllm_names: bool = False

    def __post_init__(self) -> None:
        one_of("trace_level", self.trace_level, TRACE_LEVELS)
        one_of("otlp_protocol", self.otlp_protocol, ("grpc", "http/protobuf"))
        if (self.otlp_endpoint or self.otlp_file) and not self.enable_trace:
            raise UserError("an OTLP endpoint or file is set but tracing is off: add --enable-trace")
        if self.trace_legacy_names and not self.enable_trace:
            raise UserError("trace_legacy_names is set but tracing is off: add --enable-trace")
        if self.records_max_mb is not None:
            at_least("records_max_mb", self.records_max_mb, 1)
            if self.records_out is None:
                raise UserError("records_max_mb is set but records are off: add --records-out DIR")
        if self.metrics_port is not None:
            at_least("metrics_port", self.metrics_port, 0)
            if self.metrics_port > 65535:
                raise UserError(f"metrics_port={self.metrics_port} is no port: give 0 (a free one) to 65535")
        if self.metrics_vllm_names and not self.counts_metrics:
            raise UserError(
                "metrics_vllm_names is set but metrics are off: add --metrics-port, or metrics=True in Python"
            )

    @property
    def counts_metrics(self) -> bool:
        """Whether anything is counted for Prometheus."""
        return self.metrics or self.metrics_port is not None


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ``UserError`` naming the setting and its allowed values unless ``value`` is one of them."""
    if value not in allowed:
        raise UserError(f"{name}={value!r} is unknown: choose one of {', '.join(map(str, allowed))}")


def at_least(name: str, value: int, minimum: int) -> None:
    """Raise ``UserError`` naming the setting unless ``value`` is an integer of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserError(f"{name}={value!r} is not allowed: give an integer of at least {minimum}")
