"""What quantised inputs cost: perplexity of texts, and argmax agreement with PyTorch's float32 modules on the same weights.

    .venv/bin/python bench/perplexity.py --prompts texts.jsonl

Exit code 1 if a setting's perplexity is more than 1 % above float32's.
"""

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from tiercel.cli.prompts import read_prompts
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.engine.engine import load_target
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.step import StepInput

BOUND = 1.01
SETTINGS = {
    "float32 modules": {"enforce_eager": True},
    "16-bit inputs": {"activation_bits": 16},
    "8-bit inputs, float16 KV cache": {"activation_bits": 8},
}


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt` or `turns`: the texts.")],
    limit: Annotated[int, typer.Option(help="Take so many texts, spread over the file; 0 takes all.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text at most.")] = 512,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Read every text with every setting."""
    rows = read_prompts(prompts)
    texts = [row.text for row in (rows[:: max(1, len(rows) // limit)][:limit] if limit else rows)]
    found = {}
    for name, wish in SETTINGS.items():
        found[name] = measure(EngineConfig(model=model, **wish), texts, max_tokens)  # type: ignore[arg-type]
    reference, best = found["float32 modules"]
    result = {}
    for name, (perplexity, ids) in found.items():
        agreement = float((ids == best).float().mean())
        result[name] = {"perplexity": perplexity, "ratio": perplexity / reference, "argmax_agreement": agreement}
        print(
            f"{name}: perplexity {perplexity:.4f} ({100 * (perplexity / reference - 1):+.2f} %), "
            f"argmax agreement {agreement:.4f}, {len(ids)} tokens"
        )
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(row["ratio"] > BOUND for row in result.values()))


def measure(engine: EngineConfig, texts: list[str], max_tokens: int) -> tuple[float, torch.Tensor]:
    """Perplexity over all texts, and the argmax after every token (int64 ``[tokens]``)."""
    target = load_target(engine, SpecConfig(method="none"))
    shape, cpu = target.model.description, torch.device("cpu")
    storages = [
        KvStorage(max_tokens, shape.num_kv_heads, shape.head_dim, target.model.kv_dtype, cpu)
        for _ in range(shape.num_layers)
    ]
    loss, count, best = 0.0, 0, []
    for text in texts:
        ids = torch.tensor(target.checkpoint.tokenizer.encode(text)[:max_tokens])
        rows = Rows([Segment(0, len(ids), torch.arange(max_tokens))], cpu)
        output = target.model.run(StepInput(rows, ids, torch.arange(len(ids)), with_logits=True), storages)
        assert output.logits is not None
        loss -= float(output.logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).sum())
        count += len(ids) - 1
        best.append(output.best)
    return math.exp(loss / count), torch.cat(best)


if __name__ == "__main__":
    typer.run(main)
