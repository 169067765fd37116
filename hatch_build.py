"""Builds the CPU library with the system's C++ compiler while the package is installed or packed.

Without a compiler the package still installs: it then runs on PyTorch alone, slower, and says so when it loads a model.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("tiercel/native/csrc")
LIBRARY = Path("tiercel/native/libtiercel.so")
# No fast-math: a NaN must stay one. The two exceptions name what nobody reads here: errno and the trap flags.
COMMON = ["-O3", "-std=c++20", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]
COMMON += ["-Wno-maybe-uninitialized"]  # GCC's own AVX-512 headers
UNITS: dict[str, list[str]] = {"api": [], "portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    UNITS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    UNITS["avx512vnni"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"]


class CustomBuildHook(BuildHookInterface[Any]):
    """One object file per instruction set, one library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and add the library to what is packed."""
        if self.target_name != "wheel":
            return
        compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        if compiler is None or os.name != "posix":
            self.app.display_warning(
                "tiercel: no C++ compiler found (c++, g++, clang++, or CXX): no CPU library is built"
            )
            return
        root = Path(self.root)
        objects = Path(self.directory) / "native"
        objects.mkdir(parents=True, exist_ok=True)
        running = [
            subprocess.Popen(
                [compiler, *COMMON, *flags, "-c", root / SOURCES / f"{unit}.cpp", "-o", objects / f"{unit}.o"]
            )
            for unit, flags in UNITS.items()
        ]
        if any(process.wait() != 0 for process in running):
            sys.exit(f"tiercel: {compiler} could not compile {SOURCES} (its messages are above)")
        part = root / f"{LIBRARY}.part"
        subprocess.run(
            [compiler, "-shared", "-pthread", *(objects / f"{unit}.o" for unit in UNITS), "-o", part], check=True
        )
        os.replace(part, root / LIBRARY)  # a process that runs on the old library keeps it
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
