"""The engine's tests run what users get by default: recorded steps."""

import pytest

from tiercel.engine.engine import LoadedTarget


@pytest.fixture(scope="session")
def toy_target(toy_native: LoadedTarget) -> LoadedTarget:
    return toy_native
