"""The workers by name (``core.config.SPEC_METHODS``). A new drafter is one entry here, and the conformance test runs it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from tiercel.core.config import SpecConfig
from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.mtp_checkpoint import check_fit, load_draft_model, read_description, resolve_draft
from tiercel.speculative.base_worker import SpecWorker
from tiercel.speculative.multi_layer_eagle_worker import MultiLayerEagleWorker
from tiercel.speculative.ngram_worker import NgramWorker
from tiercel.speculative.null_worker import NullWorker
from tiercel.speculative.target_runner import TargetRunner


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker may be built from."""

    checkpoint: Checkpoint
    target: TargetRunner
    spec: SpecConfig


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
        exact_kv=context.spec.exact_kv,
        max_verify_rows=_max_verify_rows(context),
    )


CPU_VERIFY_ROWS = 8
"""Where a row more begins to cost as much as it brings (``tiercel bench throughput``): beyond it, arithmetic is the limit."""


def _max_verify_rows(context: WorkerContext) -> int:
    if context.spec.max_verify_rows is not None:
        return context.spec.max_verify_rows
    return CPU_VERIFY_ROWS if context.target.placement.device.type == "cpu" else sys.maxsize


WORKERS: dict[str, Callable[[WorkerContext], SpecWorker]] = {
    NullWorker.method: _null,
    MultiLayerEagleWorker.method: _multi_layer_eagle,
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
