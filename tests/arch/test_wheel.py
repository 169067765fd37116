"""What a wheel holds: every file of the package that is under version control, and what code reads at run time."""

import subprocess
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tiercel.models.mtp_checkpoint import SHIPPED
from tiercel.observability.records import SCHEMAS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packed() -> set[str]:
    """Paths inside the wheel, as its builder chooses them (the CPU library comes from the build hook)."""
    builder = WheelBuilder(str(ROOT))
    return {included.distribution_path for included in builder.recurse_included_files()}


def test_every_tracked_file_of_the_package_is_in_the_wheel(packed: set[str]) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "tiercel"], cwd=ROOT, capture_output=True, check=True, text=True)
    tracked = {name for name in listed.stdout.split("\0") if name}
    assert tracked
    assert tracked - packed == set()


def test_the_wheel_holds_what_is_read_at_run_time_and_nothing_from_outside(packed: set[str]) -> None:
    read = [*SCHEMAS.values(), *(ROOT / "tiercel" / "report" / f"page.{kind}" for kind in ("html", "css"))]
    read += [folder / name for folder in SHIPPED.values() for name in ("config.json", "model.safetensors")]
    for path in (*read, ROOT / "tiercel" / "py.typed"):
        assert str(path.relative_to(ROOT)) in packed
    assert all(name.startswith("tiercel/") for name in packed)
    assert not any(name.endswith((".pyc", ".part")) for name in packed)
