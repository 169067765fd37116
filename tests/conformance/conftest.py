"""What each registered worker drafts with here: some drafts are right and some are wrong, so that counts can be mistaken."""

from pathlib import Path

import pytest

from tests.conftest import echoing_draft
from tiercel.engine.engine import LoadedTarget
from tiercel.models.mtp_checkpoint import save_draft

Drafts = dict[str, str]
"""``SpecConfig.draft`` by method; methods that need none are left out."""


@pytest.fixture(scope="session")
def drafts(toy_modules: LoadedTarget, toy_small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    folder = tmp_path_factory.mktemp("echoing-draft")
    save_draft(echoing_draft(toy_modules), folder, {})
    return {"multi-layer-eagle": str(folder), "eagle": str(folder), "standalone": str(toy_small_model)}
