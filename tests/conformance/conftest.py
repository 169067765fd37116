"""What each registered worker drafts with here: some drafts are right and some are wrong, so that counts can be mistaken."""

from pathlib import Path

import pytest

from tests.conftest import echoing_draft
from tests.eagle_heads import Head, Llama
from tiercel.engine.engine import LoadedTarget
from tiercel.models.mtp_checkpoint import save_draft

Drafts = dict[str, str]
"""``SpecConfig.draft`` by method; methods that need none are left out."""


@pytest.fixture(scope="session")
def drafts(
    toy_modules: LoadedTarget, toy_model: Path, toy_small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Drafts:
    folder = tmp_path_factory.mktemp("echoing-draft")
    save_draft(echoing_draft(toy_modules), folder, {})
    head = Head(Llama(toy_model), (0, 1, 2))
    head.echo()
    eagle3 = head.save_flat(folder / "eagle3", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return {
        "multi-layer-eagle": str(folder),
        "eagle": str(folder),
        "eagle3": str(eagle3),
        "standalone": str(toy_small_model),
    }
