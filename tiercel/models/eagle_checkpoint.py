"""Which EAGLE layer a draft's name stands for.

A draft folder of ours (``models.mtp_checkpoint``) gives its first MTP layer, which then drafts on from its own output, as servers
do with models that ship one MTP layer.
"""

from dataclasses import replace
from pathlib import Path

from tiercel.models.checkpoint import Checkpoint
from tiercel.models.eagle import EagleModel
from tiercel.models.mtp_checkpoint import check_fit, load_draft_model, read_description
from tiercel.models.step import Target


def check_eagle(folder: Path, checkpoint: Checkpoint) -> None:
    """Refuse a draft that cannot work with the target, before weights are read.

    Raises:
        UserError: see ``check_fit``.
    """
    check_fit(read_description(folder), checkpoint, folder)


def load_eagle(folder: Path, checkpoint: Checkpoint, target: Target) -> EagleModel:
    """The EAGLE layer in ``folder``, to run beside ``target`` as it runs.

    Raises:
        UserError: see ``load_draft_model``.
    """
    draft = load_draft_model(folder, checkpoint, target)
    body = replace(draft.description.body, num_layers=1)
    return EagleModel(draft.layers[0], body, draft.target_ids, prepare=lambda hidden: hidden)
