from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiercel.kvcache.manager import KvCacheError, KvCacheManager, OutOfPages

PAGE, PAGES = 4, 10
IDS = st.sampled_from(["a", "b", "c", "d"])


class AgainstAModel(RuleBasedStateMachine):
    """The manager against a plain dictionary of (reserved pages, committed length)."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCacheManager(PAGE * PAGES + 3, PAGE)
        self.model: dict[str, tuple[int, int]] = {}

    def free(self) -> int:
        return PAGES - sum(pages for pages, _ in self.model.values())

    @rule(name=IDS, length=st.integers(1, 30))
    def reserve(self, name: str, length: int) -> None:
        pages, committed = self.model.get(name, (0, 0))
        need = max(pages, (length + PAGE - 1) // PAGE)
        fits = need - pages <= self.free()
        assert self.kv.can_reserve(name, length) is fits
        if not fits:
            with pytest.raises(OutOfPages):
                self.kv.reserve(name, length)
            return
        before = self.kv.slots(name).tolist() if name in self.model else []
        self.kv.reserve(name, length)
        self.model[name] = (need, committed)
        assert self.kv.slots(name).tolist()[: len(before)] == before

    @rule(name=IDS, data=st.data())
    def commit(self, name: str, data: st.DataObject) -> None:
        if name in self.model:
            pages, committed = self.model[name]
            length = data.draw(st.integers(committed, pages * PAGE))
            self.kv.commit(name, length)
            self.model[name] = (pages, length)

    @rule(name=IDS)
    def rollback(self, name: str) -> None:
        if name in self.model:
            _, committed = self.model[name]
            self.kv.rollback(name)
            self.model[name] = ((committed + PAGE - 1) // PAGE, committed)

    @rule(name=IDS)
    def release(self, name: str) -> None:
        self.kv.release(name)
        self.model.pop(name, None)

    @invariant()
    def books_balance(self) -> None:
        self.kv.check()
        assert self.kv.num_slots_used == (PAGES - self.free()) * PAGE
        slots = [s for name in self.model for s in self.kv.slots(name).tolist()]
        assert len(slots) == len(set(slots))
        for name, (pages, committed) in self.model.items():
            assert len(self.kv.slots(name)) == pages * PAGE
            assert self.kv.committed(name) == committed


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_commit_beyond_what_is_reserved_or_backwards_is_a_fault() -> None:
    kv = KvCacheManager(16, 4)
    kv.reserve("a", 5)
    kv.commit("a", 5)
    for length in (9, 4):
        with pytest.raises(KvCacheError):
            kv.commit("a", length)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv: kv._free.pop(),
        lambda kv: kv._free.append(kv._owners["a"].pages[0]),
        lambda kv: kv._owners["a"].pages.reverse(),
    ],
)
def test_check_sees_damage(damage: Callable[[KvCacheManager], None]) -> None:
    kv = KvCacheManager(16, 4)
    kv.reserve("a", 8)
    kv.check()
    damage(kv)
    with pytest.raises(KvCacheError):
        kv.check()
