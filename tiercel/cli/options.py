"""Options that several commands share, and the configuration objects made of them."""

from pathlib import Path
from typing import Annotated

import typer

from tiercel.core.config import DEFAULT_MODEL, SPEC_METHODS

Model = Annotated[str, typer.Option("--model", help="smollm2-135m, a folder, a .gguf file, or hf:ORG/NAME.")]
Spec = Annotated[str, typer.Option("--spec", help=f"{', '.join(SPEC_METHODS)}.")]
Draft = Annotated[str, typer.Option("--draft", help="auto, smollm2-135m-mtp3, or a folder; for standalone a model.")]
NumSteps = Annotated[
    int | None,
    typer.Option(
        "--num-steps", help="Positions drafted for per round (K), an MTP layer each; default: as many as pay."
    ),
]
NgramMatch = Annotated[
    int | None,
    typer.Option(
        "--ngram-match", help="Prompt lookup: drafts where so many tokens occurred before; 0: off; default: 2."
    ),
]
MinConfidence = Annotated[
    float | None,
    typer.Option(
        "--min-confidence",
        help="Deeper MTP layers draft while all drafts so far are right with this probability; default: 0.4 on a CPU, else 0.",
    ),
]
Topk = Annotated[int, typer.Option("--topk", help="Candidates after each draft: above 1 drafts are trees.")]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens", help="Drafts per round at most where they form trees; default: topk times --num-steps."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Completion tokens at most.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
Quantization = Annotated[
    str, typer.Option("--quantization", help="auto (as the checkpoint has it), none, or q8_0 (CPU library).")
]
ActivationBits = Annotated[
    int, typer.Option("--activation-bits", help="8 (fast) or 16 (exact): what quantised matrices read.")
]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="Of the KV cache: auto, float16 or float32.")]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="PyTorch's modules instead of recorded steps of the CPU library.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads.")]
BatchSize = Annotated[int, typer.Option("--max-batch-size", help="Requests that run at once.")]
Prompts = Annotated[Path | None, typer.Option("--prompts", help="JSON lines with `prompt`, or Spec-Bench's `turns`.")]
TraceOut = Annotated[Path | None, typer.Option("--trace-out", help="Perfetto trace file to write.")]
RecordsOut = Annotated[Path | None, typer.Option("--records-out", help="Folder for requests.jsonl and rounds.jsonl.")]
RecordsMaxMb = Annotated[
    int | None, typer.Option("--records-max-mb", help="Begin another record file after so many megabytes.")
]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", help="Show Prometheus metrics on this port of 127.0.0.1; 0: a free one.")
]
MetricsVllmNames = Annotated[
    bool, typer.Option("--metrics-vllm-names", help="Export the metrics that vLLM has under its names as well.")
]

DEFAULT = DEFAULT_MODEL
