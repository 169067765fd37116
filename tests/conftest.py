"""A toy model in Hugging Face layout with random weights, a toy draft for it, and the real default model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.engine.engine import LoadedTarget, load_target
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.description import MtpDescription
from tiercel.models.hub import resolve_model
from tiercel.models.mtp import MtpDraft
from tiercel.models.mtp_checkpoint import save_draft
from tiercel.models.opening import open_checkpoint
from tiercel.observability.trace import set_global_trace_level

TOY_EOS = 257
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every test begins with one thread (its subprocesses too), the same generator, and nothing tuned; tracing is left off.

    Toy matrices are too small for more threads: on a busy machine, waiting for each other makes them ten times slower.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TIERCEL_TUNE_DIR", str(tmp_path_factory.getbasetemp() / "nothing-tuned"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    set_global_trace_level(0)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama over 259 tokens (the bytes, one merge and two special ones)."""
    folder = tmp_path_factory.mktemp("toy-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "th"])}, merges=[("t", "h")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|im_start|>", special=True)])
    fast.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=TOY_EOS,
        bos_token_id=None,
        initializer_range=0.4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy_checkpoint(toy_model: Path) -> Checkpoint:
    return open_checkpoint(toy_model)


@pytest.fixture(scope="session")
def toy_modules(toy_model: Path) -> LoadedTarget:
    """The toy model as PyTorch modules."""
    return load_target(EngineConfig(model=str(toy_model), enforce_eager=True), SpecConfig(method="none"))


def random_draft(
    target: LoadedTarget, *, chained: bool = True, num_layers: int = 3, draft_vocab: int = 200
) -> MtpDraft:
    """A draft with random weights for ``target``."""
    body = target.checkpoint.description
    description = MtpDescription(
        num_layers=num_layers,
        chained=chained,
        body=body,
        target_hidden_size=body.hidden_size,
        hidden_before_final_norm=True,
        embedding_first=True,
        draft_vocab_size=draft_vocab,
        target_fingerprint=target.checkpoint.fingerprint,
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(body.vocab_size, generator=generator)[:draft_vocab].sort().values
    draft = MtpDraft(description, ids - torch.arange(draft_vocab))
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    draft.share(target.model.decoder)
    return draft.requires_grad_(False)


def echoing_draft(target: LoadedTarget) -> MtpDraft:
    """A draft that is sometimes right: its layers repeat their token, as the toy target likes to do."""
    draft = random_draft(target)
    size = target.checkpoint.description.hidden_size
    for layer in draft.layers:
        layer.body.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
        layer.body.mlp.down_proj.weight.zero_()  # type: ignore[union-attr, operator]
        layer.eh_proj.weight.copy_(torch.cat((torch.eye(size), 0.1 * torch.eye(size)), 1))  # type: ignore[union-attr, operator]
    return draft


@pytest.fixture(scope="session")
def toy_native(toy_model: Path) -> LoadedTarget:
    """The toy model in the CPU library."""
    return load_target(EngineConfig(model=str(toy_model)), SpecConfig(method="none"))


@pytest.fixture(scope="session")
def toy_target(toy_modules: LoadedTarget) -> LoadedTarget:
    """What a test runs where it does not say otherwise; some folders choose another."""
    return toy_modules


@pytest.fixture(scope="session")
def toy_draft(toy_modules: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy-draft")
    save_draft(random_draft(toy_modules), folder, {})
    return folder


@pytest.fixture(scope="session")
def toy_small_model(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the toy's tokenizer that often, not always, thinks as it does."""
    folder = tmp_path_factory.mktemp("toy-small-model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((toy_model / name).read_bytes())
    model = LlamaForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data += 0.08 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model; `make test` fetches it first, and without it these tests fail rather than skip."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def real_target(smollm2: Path) -> LoadedTarget:
    """The default model as PyTorch modules."""
    return load_target(EngineConfig(model=str(smollm2), enforce_eager=True), SpecConfig(method="none"))
