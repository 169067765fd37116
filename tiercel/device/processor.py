"""Which processor this is."""

import platform
import re
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def processor(device: torch.device) -> str:
    """The name of the device that computes: of the GPU, or ``cpu_model``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name, family and model as the kernel has them; elsewhere what Python knows."""
    if not cpuinfo.is_file():
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([^\t:]+)\s*: (.*)$", cpuinfo.read_text().split("\n\n")[0], re.M))
    name = fields.get("model name", platform.machine())
    numbers = [f"{key} {fields[field]}" for key, field in _NUMBERS if field in fields]
    return f"{name} ({', '.join(numbers)})" if numbers else name


_NUMBERS = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
