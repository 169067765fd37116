"""Our decoder against ``transformers`` on the same weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tiercel.kvcache.manager import KvCacheManager
from tiercel.kvcache.rows import PagedAttention, Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.attention import DenseAttention
from tiercel.models.decoder import Decoder
from tiercel.models.loading import load_decoder
from tiercel.models.opening import open_checkpoint

CPU = torch.device("cpu")
TOLERANCE = 1e-3
PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.\n\n```python\ndef",
    "Übersetze ins Englische: Der Hund läuft über die Straße.",
    "What is 17 * 23? Think step by step.",
    "List five fruits, one per line.",
    "Tell me a story about a fox and a crow 🦊.",
    "Summarize: The meeting began at nine. Nobody had read the papers, so it ended at ten past nine.",
    "Who wrote Faust?",
    "Give three synonyms for 'happy'.",
    "Explain recursion to a child.",
    "What is the capital of Australia?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Name the planets of the solar system in order.",
    "Write a haiku about rain.",
    "Is 91 a prime number?",
    "How do I boil an egg?",
    "Correct the grammar: she don't likes apples.",
    "What does HTTP stand for?",
    "日本の首都はどこですか。",
    "Describe the water cycle in two sentences. " * 8,
]


def paged(
    decoder: Decoder, kv: KvCacheManager, storages: list[KvStorage], spans: dict[str, tuple[int, list[int]]]
) -> torch.Tensor:
    """Logits of the given rows: name → (first position, token ids)."""
    shape = decoder.description
    segments, tokens = [], []
    for name, (start, ids) in spans.items():
        kv.reserve(name, start + len(ids))
        segments.append(Segment(start, start + len(ids), kv.slots(name)))
        tokens += ids
    rows = Rows(segments, CPU)
    attention = PagedAttention(rows, storages, shape.num_heads // shape.num_kv_heads)
    return decoder.logits(decoder(torch.tensor(tokens), rows.positions, attention))


def storages_for(decoder: Decoder, slots: int) -> list[KvStorage]:
    shape = decoder.description
    return [KvStorage(slots, shape.num_kv_heads, shape.head_dim, torch.float32, CPU) for _ in range(shape.num_layers)]


@torch.inference_mode()
def test_default_model_agrees_with_transformers_in_prefill_decode_and_batches(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    ours = load_decoder(checkpoint, torch.float32, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    ids = [checkpoint.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS]
    expected = [theirs(torch.tensor([i])).logits[0] for i in ids]

    dense = [ours.logits(ours(torch.tensor(i), torch.arange(len(i)), DenseAttention(1))) for i in ids]
    assert max((a - b).abs().max() for a, b in zip(dense, expected, strict=True)) < TOLERANCE

    # All but the last three tokens as one ragged prefill, then three decode steps of all twenty together.
    kv = KvCacheManager(4096, 16)
    storages = storages_for(ours, kv.num_slots_total)
    names = [str(n) for n in range(len(ids))]
    starts = [len(i) - 3 for i in ids]
    prefill = paged(ours, kv, storages, {n: (0, i[:s]) for n, i, s in zip(names, ids, starts, strict=True)})
    wanted = torch.cat([e[:s] for e, s in zip(expected, starts, strict=True)])
    assert (prefill - wanted).abs().max() < TOLERANCE
    for step in range(3):
        rows = {n: (s + step, [i[s + step]]) for n, i, s in zip(names, ids, starts, strict=True)}
        got = paged(ours, kv, storages, rows)
        wanted = torch.stack([e[s + step] for e, s in zip(expected, starts, strict=True)])
        assert (got - wanted).abs().max() < TOLERANCE

    # And one request alone.
    alone = paged(ours, kv, storages, {"alone": (0, ids[0][:-1])})
    assert (alone - expected[0][:-1]).abs().max() < TOLERANCE
    last = paged(ours, kv, storages, {"alone": (len(ids[0]) - 1, ids[0][-1:])})
    assert (last[0] - expected[0][-1]).abs().max() < TOLERANCE


SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False), LlamaForCausalLM),
        (LlamaConfig(**SIZES, num_key_value_heads=6, head_dim=16, tie_word_embeddings=True), LlamaForCausalLM),
        (Qwen2Config(**SIZES, num_key_value_heads=3, tie_word_embeddings=True), Qwen2ForCausalLM),
    ],
    ids=["llama-gqa-untied", "llama-mha-wide-heads", "qwen2-biased"],
)
@torch.inference_mode()
def test_random_weights_agree_with_transformers(config: LlamaConfig, kind: type, tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = kind(config).eval()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)  # norms and biases that matter
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    checkpoint = open_checkpoint(tmp_path)
    ours = load_decoder(checkpoint, torch.float32, CPU)
    ids = torch.randint(0, 99, (2, 17))
    got = ours.logits(ours(ids.flatten(), torch.arange(17).repeat(2), DenseAttention(2))).view(2, 17, -1)
    torch.testing.assert_close(got, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    ragged = paged(
        ours, KvCacheManager(64, 4), storages_for(ours, 64), {"a": (0, ids[0].tolist()), "b": (0, ids[1, :5].tolist())}
    )
    torch.testing.assert_close(ragged, torch.cat((got[0], got[1, :5])), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_bfloat16_runs_close_to_float32(toy_model: Path) -> None:
    checkpoint = open_checkpoint(toy_model)
    ids, positions = torch.arange(30), torch.arange(30)
    wide, narrow = (load_decoder(checkpoint, d, CPU) for d in (torch.float32, torch.bfloat16))
    a, b = (d.logits(d(ids, positions, DenseAttention(1))) for d in (wide, narrow))
    assert b.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(a, b).min() > 0.99
