"""Tiercel: multi-layer EAGLE speculative decoding in which every round of every request can be seen."""

from typing import TYPE_CHECKING, Any

from tiercel.core.config import EngineConfig, SpecConfig, TraceConfig
from tiercel.core.errors import UserError
from tiercel.core.sampling_params import SamplingParams
from tiercel.core.speculative_params import SpeculativeParams
from tiercel.core.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from tiercel.engine.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "EngineConfig",
    "SamplingParams",
    "SpecConfig",
    "SpeculativeParams",
    "StructuredOutputs",
    "TraceConfig",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # The engine pulls in PyTorch: `import tiercel` alone stays quick.
    if name == "LLM":
        from tiercel.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'tiercel' has no attribute {name!r}")
