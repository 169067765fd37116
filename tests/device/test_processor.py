"""The processor's name."""

from pathlib import Path

from tiercel.device.processor import cpu_model


def test_the_processor_is_named_from_the_kernels_file(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    core = "processor\t: {}\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Some CPU @ 2 GHz\nstepping\t: 1\nflags\t\t: fpu vme\n"
    file.write_text(core.format(0) + "\n" + core.format(1).replace("Some", "Other"))
    assert cpu_model(file) == "Some CPU @ 2 GHz (family 25, model 17, stepping 1)"
    assert cpu_model(tmp_path / "none") != ""
