"""On what, and with which versions, something was measured."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tiercel.device.processor import cpu_model
from tiercel.native.library import code_path, library

MEMINFO = Path("/proc/meminfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe() -> dict[str, Any]:
    """Processor, cores this process may use, memory, caches, threads, and the CPU library's code path (None: not built)."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "threads": torch.get_num_threads(),
        "code_path": code_path() if library() is not None else None,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of this side: Tiercel, PyTorch, Python."""
    return {"tiercel": version("tiercel"), "torch": torch.__version__, "python": platform.python_version()}


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache that core 0 has; None where the kernel does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)


def _memory_bytes() -> int | None:
    if not MEMINFO.is_file():
        return None
    found = re.search(r"^MemTotal:\s+(\d+) kB$", MEMINFO.read_text(), re.M)
    return int(found[1]) * 1024 if found else None
