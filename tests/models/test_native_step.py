"""Recorded steps against the PyTorch modules they replace, on toy and real weights."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import random_draft
from tests.native.test_matrix import needs_library
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.core.errors import UserError
from tiercel.engine.engine import LoadedTarget, load_target
from tiercel.kvcache.rows import Rows, Segment
from tiercel.kvcache.storage import KvStorage
from tiercel.models.mtp_checkpoint import load_draft_model, save_draft
from tiercel.models.native_step import NativeTarget
from tiercel.models.step import DraftModel, StepInput, StepModel, StepOutput
from tiercel.native.library import CODE_PATHS, code_path, set_code_path
from tiercel.native.matrix import Format

pytestmark = needs_library
CPU = torch.device("cpu")
NONE = SpecConfig(method="none")
# Two requests: one reads a prompt in two chunks and then single tokens, the other joins later; slots lie anywhere.
SLOTS = {"a": torch.arange(40).flip(0).contiguous(), "b": torch.arange(40, 64)}
STEPS = [
    [("a", 0, 9)],
    [("a", 9, 17), ("b", 0, 5)],
    [("b", 5, 6), ("a", 17, 18)],
    [("a", 18, 22), ("b", 6, 9)],
    [("a", 20, 21)],  # a position is computed again: its keys and values are replaced
]


@pytest.fixture(scope="module")
def native(toy_model: Path) -> LoadedTarget:
    return load_target(EngineConfig(model=str(toy_model)), NONE)


def storages(target: LoadedTarget, layers: int) -> list[KvStorage]:
    shape = target.model.description
    return [KvStorage(64, shape.num_kv_heads, shape.head_dim, torch.float32, CPU) for _ in range(layers)]


def play(model: StepModel, kept: list[KvStorage], vocab: int, width: int | None = None) -> list[StepOutput]:
    """All of ``STEPS``, with logits for the last row of each request (and the first row of the step)."""
    generator, outputs = torch.Generator().manual_seed(3), []
    for spans in STEPS:
        rows = Rows([Segment(start, end, SLOTS[name]) for name, start, end in spans], CPU)
        ends = torch.tensor(rows.counts).cumsum(0) - 1
        tokens = torch.randint(vocab, (rows.num_rows,), generator=generator)
        hidden = None if width is None else torch.randn(rows.num_rows, width, generator=generator)
        wanted = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
        outputs.append(model.run(StepInput(rows, tokens, wanted, True, hidden), kept))
    return outputs


def assert_same(ours: list[StepOutput], theirs: list[StepOutput], tolerance: float) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        for got, expected in ((mine.hidden, reference.hidden), (mine.logits, reference.logits)):
            assert (got - expected).abs().max() <= tolerance * expected.abs().max()  # type: ignore[operator, union-attr]
        assert torch.equal(mine.best, mine.logits.max(-1).indices)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", CODE_PATHS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_target_computes_what_its_modules_do(
    toy_target: LoadedTarget, native: LoadedTarget, name: str, threads: int
) -> None:
    before = code_path()
    try:
        set_code_path(name)
    except ValueError:
        pytest.skip(f"this processor has no {name}")
    torch.set_num_threads(threads)
    ours, theirs = storages(toy_target, 2), storages(toy_target, 2)
    try:
        assert native.model.is_graph
        assert_same(play(native.model, ours, 259), play(toy_target.model, theirs, 259), 1e-5)
    finally:
        set_code_path(before)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.keys, reference.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, reference.values, atol=1e-4, rtol=1e-4)


LONG_SLOTS = torch.randperm(700, generator=torch.Generator().manual_seed(0)).split([300, *[20] * 20])
"""One long context and twenty short ones, anywhere in the pool."""


def read_long(
    target: LoadedTarget, kept: list[KvStorage], spans: list[tuple[int, int, int]], generator: torch.Generator
) -> StepOutput:
    """One step over (request, start, end)."""
    rows = Rows([Segment(start, end, LONG_SLOTS[name].contiguous()) for name, start, end in spans], CPU)
    tokens = torch.randint(259, (rows.num_rows,), generator=generator)
    return target.model.run(StepInput(rows, tokens, torch.arange(rows.num_rows), True), kept)


@pytest.mark.parametrize("name", CODE_PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_contexts_and_a_half_precision_cache(
    toy_target: LoadedTarget, native: LoadedTarget, name: str, dtype: torch.dtype
) -> None:
    """Prefill, chunk, verify and decode across the pieces that attention cuts a context into."""
    before = code_path()
    try:
        set_code_path(name)
    except ValueError:
        pytest.skip(f"this processor has no {name}")
    torch.set_num_threads(2)
    found = []
    try:
        for target in (native, toy_target):
            shape, generator = target.model.description, torch.Generator().manual_seed(1)
            kept = [KvStorage(700, shape.num_kv_heads, shape.head_dim, dtype, CPU) for _ in range(2)]
            kept[1].keys.fill_(torch.nan)  # whatever lies in slots that nobody has written stays out
            spans = [
                [(0, 0, 63)],
                [(0, 63, 192), (1, 0, 7)],
                [(0, 192, 193), (1, 7, 8)],
                [(0, 193, 197)],
                [(0, 190, 270)],
            ]
            found.append([read_long(target, kept, one, generator) for one in spans])
            # a value beyond half precision's range is held as its largest
            kept[0].write(LONG_SLOTS[2][:1], *[torch.full((1, shape.num_kv_heads, shape.head_dim), 1e6)] * 2)
            assert kept[0].keys.abs().max() == (65504 if dtype is torch.float16 else 1e6)
    finally:
        set_code_path(before)
    assert_same(*found, 1e-5 if dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_is_the_same_bit_for_bit_however_attention_is_shared_out(
    native: LoadedTarget, dtype: torch.dtype
) -> None:
    shape = native.model.description
    outputs = []
    for threads, others, step in ((1, 0, 1), (2, 20, 1), (5, 0, 4), (3, 20, 4)):
        torch.set_num_threads(threads)
        kept = [KvStorage(700, shape.num_kv_heads, shape.head_dim, dtype, CPU) for _ in range(2)]
        prompt = torch.Generator().manual_seed(1)
        read_long(native, kept, [(0, 0, 200)], prompt)
        tokens = torch.randint(259, (4,), generator=prompt)
        mine = []
        for start in range(0, 4, step):
            spans = [(0, 200 + start, 200 + start + step), *((i + 1, 0, 3) for i in range(others))]
            rows = Rows([Segment(a, b, LONG_SLOTS[n].contiguous()) for n, a, b in spans], CPU)
            ids = torch.cat((tokens[start : start + step], torch.full((rows.num_rows - step,), 9)))
            mine.append(native.model.run(StepInput(rows, ids, torch.arange(step), True), kept).logits)
        outputs.append(torch.cat(mine))  # type: ignore[arg-type]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("head_dim", [8, 32, 64, 96, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_head_sizes_and_biases(toy_model: Path, tmp_path: Path, head_dim: int, bias: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 259,
        "hidden_size": head_dim * 4 if bias else 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
    }
    model = (
        Qwen2ForCausalLM(Qwen2Config(**sizes)) if bias else LlamaForCausalLM(LlamaConfig(head_dim=head_dim, **sizes))
    )
    if bias:
        for layer in model.model.layers:
            for part in "qkv":
                torch.nn.init.normal_(getattr(layer.self_attn, f"{part}_proj").bias)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(toy_model / name, tmp_path)
    targets = [load_target(EngineConfig(model=str(tmp_path), enforce_eager=eager), NONE) for eager in (False, True)]
    ours, theirs = (play(t.model, storages(t, 2), 259) for t in targets)
    assert_same(ours, theirs, 5e-5)


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("embedding_first", [True, False])
def test_mtp_layers_compute_what_their_modules_do(
    toy_target: LoadedTarget, native: LoadedTarget, tmp_path: Path, chained: bool, embedding_first: bool
) -> None:
    draft = random_draft(toy_target)
    draft.description = dataclasses.replace(draft.description, chained=chained, embedding_first=embedding_first)
    save_draft(draft, tmp_path, {})
    ours, theirs = (load_draft_model(tmp_path, t.checkpoint, t.model) for t in (native, toy_target))
    assert torch.equal(ours.target_ids, theirs.target_ids)
    width = draft.description.target_hidden_size
    for mine, reference in zip(ours.layers, theirs.layers, strict=True):
        assert_same(
            play(mine, storages(native, 1), 259, width), play(reference, storages(toy_target, 1), 259, width), 1e-5
        )


@pytest.mark.parametrize(("bits", "worst", "cosine"), [(16, 0.02, 0.999_99), (8, 3.0, 0.99)])
def test_real_weights_give_the_modules_logits(
    real_target: LoadedTarget, smollm2: Path, bits: int, worst: float, cosine: float
) -> None:
    """The file's own blocks: with 16-bit inputs almost float32, with 8-bit inputs near it."""
    real_native = load_target(EngineConfig(model=str(smollm2), activation_bits=bits), NONE)
    text = "The comet passed close to the Sun, and its tail, made of dust and gas, could be seen for weeks."
    ids = torch.tensor(real_native.checkpoint.tokenizer.encode(text))
    rows = Rows([Segment(0, len(ids), torch.arange(64))], CPU)
    step = StepInput(rows, ids, torch.arange(len(ids)), with_logits=True)
    shape, outputs = real_target.model.description, []
    for target in (real_native, real_target):
        kept = storages(target, shape.num_layers)
        outputs.append(target.model.run(step, kept))
    ours, theirs = outputs
    assert ours.logits is not None
    assert theirs.logits is not None
    assert (ours.logits - theirs.logits).abs().max() < worst
    assert torch.nn.functional.cosine_similarity(ours.logits, theirs.logits).min() > cosine
    assert (ours.best == theirs.best).float().mean() >= (1.0 if bits == 16 else 0.8)
    assert isinstance(real_native.model, NativeTarget)
    assert real_native.model.model.head.format is Format.Q8_0


def test_nan_is_marked_and_stays_in_its_request(native: LoadedTarget) -> None:
    kept = storages(native, 2)
    kept[0].keys[:, SLOTS["a"][0]] = torch.nan
    rows = Rows([Segment(1, 3, SLOTS["a"]), Segment(0, 2, SLOTS["b"])], CPU)
    output = native.model.run(StepInput(rows, torch.tensor([5, 6, 7, 8]), torch.tensor([1, 3])), kept)
    assert output.best[0] == -1
    assert output.best[1] >= 0
    assert output.hidden[:2].isnan().all()
    assert output.hidden[2:].isfinite().all()
    assert output.logits is None


def test_the_first_of_equal_logits_wins(toy_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "twins"
    shutil.copytree(toy_model, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[200:] = embedding[100]  # the rows of other panels, and of other threads
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    target = load_target(EngineConfig(model=str(folder)), NONE)
    torch.set_num_threads(3)
    found = torch.cat([o.best for o in play(target.model, storages(target, 2), 259)])
    assert not set(found.tolist()) & set(range(201, 259))


def test_quantisation_is_as_asked(toy_model: Path, tmp_path: Path, toy_target: LoadedTarget) -> None:
    rounded = load_target(EngineConfig(model=str(toy_model), quantization="q8_0", activation_bits=16), NONE)
    assert isinstance(rounded.model, NativeTarget)
    assert rounded.model.head_blocks.format is Format.Q8_0
    ours, theirs = (play(t.model, storages(t, 2), 259)[0].logits for t in (rounded, toy_target))
    assert ours is not None
    assert 0 < (ours - theirs).abs().max() < 0.1 * theirs.abs().max()  # type: ignore[operator, union-attr]
    save_draft(random_draft(toy_target), tmp_path, {})
    draft: DraftModel = load_draft_model(tmp_path, rounded.checkpoint, rounded.model)
    assert draft.layers[0].model.head.format is Format.Q4_0  # type: ignore[attr-defined]
    for wrong in ({"enforce_eager": True}, {"dtype": "bfloat16"}, {"device": "cuda"}):
        with pytest.raises(UserError, match="q8_0"):
            EngineConfig(quantization="q8_0", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="quantization='q4'"):
        EngineConfig(quantization="q4")


def test_without_the_library_pytorch_runs_and_says_so(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.models.opening.library", lambda: None)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        target = load_target(EngineConfig(model=str(toy_model)), NONE)
    assert not target.model.is_graph
    with pytest.raises(UserError, match="CPU library"):
        load_target(EngineConfig(model=str(toy_model), quantization="q8_0", activation_bits=16), NONE)


def test_a_damaged_tensor_is_named(toy_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(toy_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight.* NaN"):
        load_target(EngineConfig(model=str(folder)), NONE)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"missing, 'norm\.weight'"):
        load_target(EngineConfig(model=str(folder)), NONE)
