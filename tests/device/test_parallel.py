import pytest
import torch

from tiercel.core.config import EngineConfig
from tiercel.core.errors import UserError
from tiercel.device import parallel
from tiercel.device.placement import place


def test_the_draft_group_is_restored_whatever_happens() -> None:
    group, before = parallel.TensorParallelGroup(), parallel.current_tp_group()
    seen = []

    def fail() -> None:
        with parallel.draft_tp_context(group):
            seen.append(parallel.current_tp_group())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [group]
    assert parallel.current_tp_group() is before


def test_drafts_get_the_speculative_moe_backend_if_there_is_one() -> None:
    with parallel.moe_backends("loop", None), parallel.speculative_moe_backend_context():
        assert parallel.current_moe_backend() == "loop"
    with parallel.moe_backends("loop", "grouped"):
        with parallel.speculative_moe_backend_context():
            assert parallel.current_moe_backend() == "grouped"
        assert parallel.current_moe_backend() == "loop"


def test_one_rank_reduces_to_itself() -> None:
    x = torch.ones(3)
    assert parallel.SINGLE.all_reduce(x) is x


def test_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = place(EngineConfig())
    assert (found.device.type, found.dtype, found.clock) == ("cpu", torch.float32, "host")
    assert place(EngineConfig(dtype="bfloat16")).dtype is torch.bfloat16
    with pytest.raises(UserError, match="cuda"):
        place(EngineConfig(device="cuda"))
