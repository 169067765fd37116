"""The workers by name (``core.config.SPEC_METHODS``). A new drafter is one entry here, and the conformance test runs it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.depths import Depth, DepthTable
from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.eagle_checkpoint import check_eagle, load_eagle, resolve_eagle
from tiercel.models.hub import resolve_model
from tiercel.models.mtp_checkpoint import check_fit, load_draft_model, read_description, resolve_draft
from tiercel.models.opening import load_model, open_checkpoint
from tiercel.speculative.autoregressive_worker import DEFAULT_NUM_STEPS
from tiercel.speculative.base_worker import SpecWorker
from tiercel.speculative.eagle_worker import Eagle3Worker, EagleWorker
from tiercel.speculative.multi_layer_eagle_worker import MultiLayerEagleWorker
from tiercel.speculative.ngram_worker import NgramWorker
from tiercel.speculative.null_worker import NullWorker
from tiercel.speculative.standalone_worker import StandaloneWorker
from tiercel.speculative.target_runner import TargetRunner
from tiercel.speculative.tuned import read_tuned, tune_folder, tune_key


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker may be built from."""

    checkpoint: Checkpoint
    target: TargetRunner
    engine: EngineConfig
    spec: SpecConfig


EAGLE_WORKERS: dict[str, type[EagleWorker]] = {worker.method: worker for worker in (EagleWorker, Eagle3Worker)}


def _null(context: WorkerContext) -> SpecWorker:
    return NullWorker(context.target, 0)


def _ngram(context: WorkerContext) -> SpecWorker:
    return NgramWorker(context.target, context.spec.lookup, _max_verify_rows(context))


def _multi_layer_eagle(context: WorkerContext) -> SpecWorker:
    folder = resolve_draft(context.spec.draft, context.checkpoint)
    draft = load_draft_model(folder, context.checkpoint, context.target.model)
    num_steps = checked_num_steps(context.spec, draft.description.num_layers, str(folder))
    return MultiLayerEagleWorker(
        context.target,
        draft,
        num_steps,
        lookup=context.spec.lookup,
        min_confidence=_min_confidence(context),
        exact_kv=context.spec.exact_kv,
        max_verify_rows=_max_verify_rows(context),
        depths=_depths(context, folder, num_steps),
        is_adaptive=_is_adaptive(context.spec),
        topk=context.spec.topk,
        num_draft_tokens=context.spec.num_draft_tokens,
        max_batch_size=context.engine.max_batch_size,
    )


def _standalone(context: WorkerContext) -> SpecWorker:
    checkpoint = open_standalone(context.spec, context.checkpoint)
    draft = load_model(checkpoint, context.engine, context.target.placement)
    kv_dtype = draft.kv_dtype if context.engine.kv_dtype == "auto" else context.target.kv_dtype
    return StandaloneWorker(context.target, draft, kv_dtype, **_autoregressive(context))


def _eagle(context: WorkerContext) -> SpecWorker:
    worker = EAGLE_WORKERS[context.spec.method]
    folder = resolve_eagle(context.spec.draft, context.checkpoint, worker.method)
    model = load_eagle(folder, context.checkpoint, context.target.model, worker.method)
    return worker(context.target, model, **_autoregressive(context))


def _autoregressive(context: WorkerContext) -> dict[str, Any]:
    spec = context.spec
    return {
        "num_steps": DEFAULT_NUM_STEPS if spec.num_steps is None else spec.num_steps,
        "topk": spec.topk,
        "num_draft_tokens": spec.num_draft_tokens,
        "min_confidence": _min_confidence(context),
        "max_verify_rows": _max_verify_rows(context),
        "max_batch_size": context.engine.max_batch_size,
    }


CPU_VERIFY_ROWS = 8
"""Where a row more begins to cost as much as it brings (``tiercel bench throughput``): beyond it, arithmetic is the limit."""
CPU_DEPTHS = DepthTable("usual on a CPU", (Depth(2, 1), Depth(4, 0), Depth(None, 0, lookup=False)))
"""Where nothing was asked for or tuned. One layer pays for itself with one or two requests, prompt lookup with a few; with more,
a row more costs about what it brings (``tiercel bench throughput``)."""
CPU_MIN_CONFIDENCE = 0.4
"""Where drafts are less sure to be right, one more costs more than it brings."""


def _max_verify_rows(context: WorkerContext) -> int:
    if context.spec.max_verify_rows is not None:
        return context.spec.max_verify_rows
    return CPU_VERIFY_ROWS if context.target.placement.device.type == "cpu" else sys.maxsize


def _min_confidence(context: WorkerContext) -> float:
    if context.spec.min_confidence is not None:
        return context.spec.min_confidence
    return CPU_MIN_CONFIDENCE if context.target.placement.device.type == "cpu" else 0.0


def _depths(context: WorkerContext, draft: Path, num_steps: int) -> DepthTable | None:
    """Depths by load, for a draft folder and K; None: the rule of ``max_verify_rows``."""
    spec = context.spec
    found = spec.depths or _tuned(context, draft) or _usual(context)
    if found is None:
        return None
    if found.most_steps > num_steps:
        raise UserError(f"depths use {found.most_steps} MTP layers, but {num_steps} are in use: {found}")
    return found.with_lookup() if spec.ngram_match else found


def _is_free(spec: SpecConfig) -> bool:
    return spec.num_steps is None and spec.max_verify_rows is None and spec.topk == 1


def _is_adaptive(spec: SpecConfig) -> bool:
    if spec.adaptive is not None:
        return spec.adaptive
    return _is_free(spec) and spec.depths is None and spec.exact_kv


def _usual(context: WorkerContext) -> DepthTable | None:
    return CPU_DEPTHS if _is_free(context.spec) and context.target.placement.device.type == "cpu" else None


def _tuned(context: WorkerContext, draft: Path) -> DepthTable | None:
    spec = context.spec
    # A key reads the draft's files: only where it may lead somewhere.
    if not spec.tuned or not _is_free(spec) or not tune_folder().is_dir():
        return None
    target = context.target
    return read_tuned(tune_key(context.checkpoint, target.model, target.placement, context.engine, draft).path)


WORKERS: dict[str, Callable[[WorkerContext], SpecWorker]] = {
    NullWorker.method: _null,
    MultiLayerEagleWorker.method: _multi_layer_eagle,
    **dict.fromkeys(EAGLE_WORKERS, _eagle),
    StandaloneWorker.method: _standalone,
    NgramWorker.method: _ngram,
}


def make_worker(context: WorkerContext) -> SpecWorker:
    """Build the worker that ``context.spec.method`` names.

    Raises:
        UserError: the draft is unknown or does not fit the target, or K exceeds its layers.
    """
    return WORKERS[context.spec.method](context)


def check_spec(spec: SpecConfig, checkpoint: Checkpoint) -> None:
    """Refuse a draft or depth that cannot work, before any weight is read.

    Raises:
        UserError: see ``make_worker``.
    """
    if spec.method == MultiLayerEagleWorker.method:
        folder = resolve_draft(spec.draft, checkpoint)
        description = read_description(folder)
        check_fit(description, checkpoint, folder)
        checked_num_steps(spec, description.num_layers, str(folder))
    elif spec.method in EAGLE_WORKERS:
        check_eagle(resolve_eagle(spec.draft, checkpoint, spec.method), checkpoint, spec.method)
    elif spec.method == StandaloneWorker.method:
        open_standalone(spec, checkpoint)


def open_standalone(spec: SpecConfig, target: Checkpoint) -> Checkpoint:
    """The draft model that ``spec`` names.

    Raises:
        UserError: it names none, or one whose tokens are not the target's; see also ``resolve_model`` and ``open_checkpoint``.
    """
    if spec.draft == "auto":
        raise UserError(
            "method 'standalone' needs a draft model: name a smaller one with the target's tokenizer (--draft)"
        )
    found = open_checkpoint(resolve_model(spec.draft))
    if found.tokenizer.vocabulary_in_order() != target.tokenizer.vocabulary_in_order():
        raise UserError(
            f"draft model {spec.draft} does not fit {target.path}: its tokenizer has other tokens; "
            "choose a model of the same family"
        )
    return found


def checked_num_steps(spec: SpecConfig, num_layers: int, draft: str) -> int:
    """K in force: every layer unless ``spec.num_steps`` asks for fewer.

    Raises:
        UserError: more steps than layers.
    """
    if spec.num_steps is None:
        return num_layers
    if spec.num_steps > num_layers:
        raise UserError(
            f"num_steps={spec.num_steps}, but draft {draft} holds {num_layers} MTP layers: choose 0 to {num_layers}"
        )
    return spec.num_steps
