"""EAGLE heads built from transformers' parts: what they compute, and the files that they are published in."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

DRAFT_VOCAB = 200


class Llama:
    """The target, by transformers: hidden states at any depth."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config

    @torch.inference_mode()
    def hidden(self, text: list[int], layers: int) -> Tensor:
        """What comes out of so many layers: ``[rows, hidden_size]``; 0 is the embedding."""
        found: list[Tensor] = []
        decoder = self.model.model
        watched = decoder.embed_tokens if layers == 0 else decoder.layers[layers - 1]
        handle = watched.register_forward_hook(lambda module, inputs, out: found.append(out))
        decoder(torch.tensor([text]))
        handle.remove()
        return found[0][0]


class Head(nn.Module):
    """An EAGLE head whose parameters have SafeAILab's names; runs over whole texts and caches nothing.

    Args:
        target: the model that it drafts for.
        taps: layers that have run where EAGLE-3's hidden states are taken; empty: EAGLE.
        bias: of ``fc``.
        own_embedding: whether it has an embedding of its own (else the target's).
        norm_before_residual: see ``EagleDescription``.
        norm_output: likewise.
    """

    def __init__(
        self,
        target: Llama,
        taps: tuple[int, ...] = (),
        *,
        bias: bool = False,
        own_embedding: bool = False,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__()
        given = target.config.to_dict() | {
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        }
        self.config = LlamaConfig(**{k: v for k, v in given.items() if k not in ("model_type", "_attn_implementation")})
        self.config._attn_implementation = "eager"
        self.config.architectures = None
        size, eps, taken = self.config.hidden_size, self.config.rms_norm_eps, len(taps)
        layer = LlamaDecoderLayer(self.config, 0)
        self.fc = nn.Linear(size * (taken or 2), size, bias=bias)
        if taps:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(layer.self_attn, name, nn.Linear(2 * size, size, bias=False))
            layer.hidden_norm = LlamaRMSNorm(size, eps)
            self.midlayer, self.norm = layer, LlamaRMSNorm(size, eps)
            self.lm_head = nn.Linear(size, DRAFT_VOCAB, bias=False)
            ids = torch.randperm(self.config.vocab_size, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB]
            self.register_buffer("d2t", ids.sort().values - torch.arange(DRAFT_VOCAB))
            t2d = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            t2d[ids] = True
            self.register_buffer("t2d", t2d)
        else:
            layer.input_layernorm = nn.Identity()
            self.layers = nn.ModuleList([layer])
        if own_embedding:
            self.embed_tokens = nn.Embedding(self.config.vocab_size, size)
        self.taps, self.layer_of = taps, [layer]
        self.norm_before_residual, self.norm_output, self.targets = norm_before_residual, norm_output, [target]
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3 if taps else 0.12, generator=generator)
        self.requires_grad_(False).eval()

    @property
    def target_ids(self) -> Tensor:
        """Target id of every token that it proposes."""
        return self.d2t + torch.arange(DRAFT_VOCAB) if self.taps else torch.arange(self.config.vocab_size)

    def prepared(self, text: list[int]) -> Tensor:
        """What rows of known tokens pair with their embeddings."""
        target = self.targets[0]
        if self.taps:
            found: Tensor = self.fc(torch.cat([target.hidden(text, tap) for tap in self.taps], -1))
            return found
        last: Tensor = target.hidden(text, target.config.num_hidden_layers)
        return target.model.model.norm(last)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def run(self, token_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What it reads of its own, and its logits, for every row."""
        layer, size = self.layer_of[0], len(token_ids)
        owned = self.embed_tokens if hasattr(self, "embed_tokens") else self.targets[0].model.model.embed_tokens
        embeddings = owned(torch.tensor(token_ids))
        rotary = LlamaRotaryEmbedding(self.config)(embeddings[None], torch.arange(size)[None])
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        if not self.taps:
            joined = self.fc(torch.cat((embeddings, hidden), -1))
            out: Tensor = layer(joined[None], attention_mask=mask, position_embeddings=rotary)[0]
            return out, self.targets[0].model.lm_head(out)
        normed = layer.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        joined = torch.cat((layer.input_layernorm(embeddings), normed), -1)
        attended = residual + layer.self_attn(joined[None], position_embeddings=rotary, attention_mask=mask)[0][0]
        out = attended + layer.mlp(layer.post_attention_layernorm(attended))
        final = self.norm(out)
        return (final if self.norm_output else out), self.lm_head(final)

    @torch.inference_mode()
    def scores(self, text: list[int], path: list[int]) -> Tensor:
        """Log-probabilities after ``path``: known rows with the target's hidden states, each draft with the output before."""
        tokens, hidden = text[1:], self.prepared(text[:-1])
        for step in range(len(path) + 1):
            own, logits = self.run(tokens, hidden)
            if step < len(path):
                tokens, hidden = [*tokens, path[step]], torch.cat((hidden, own[-1:]))
        return logits[-1].log_softmax(-1)

    def echo(self) -> None:
        """Let it repeat its token, as the toy target likes to do: it is sometimes right."""
        layer, size = self.layer_of[0], self.config.hidden_size
        layer.mlp.down_proj.weight.zero_()
        if not self.taps:
            layer.self_attn.o_proj.weight.zero_()
            self.fc.weight.copy_(torch.cat((torch.eye(size), 0.1 * torch.eye(size)), 1))
            return
        both = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
        for name, scale in (("q_proj", 6.0), ("k_proj", 6.0), ("v_proj", 1.0)):
            getattr(layer.self_attn, name).weight.copy_(scale * both)
        layer.self_attn.o_proj.weight.copy_(torch.eye(size))
        self.fc.weight.mul_(0.05)
        self.lm_head.weight.copy_(self.targets[0].model.lm_head.weight[self.target_ids])

    def save_flat(self, folder: Path, **settings: Any) -> Path:
        """As SafeAILab and SGLang have it: a flat config, ``midlayer`` or ``layers.0``."""
        config = self._config() | ({"draft_vocab_size": DRAFT_VOCAB} if self.taps else {}) | settings
        return self._save(folder, config, {name: t.contiguous() for name, t in self.state_dict().items()})

    def save_speculators(self, folder: Path, **settings: Any) -> Path:
        """As vLLM's speculators have it: the layer's config is nested."""
        kind = "eagle3" if self.taps else "eagle"
        config: dict[str, Any] = {"speculators_model_type": kind, "transformer_layer_config": self._config()}
        config |= {"architectures": [f"{kind.capitalize()}Speculator"]}
        if self.taps:
            config |= {"draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": self.norm_before_residual}
            names = {"midlayer.": "layers.0."}
        else:
            names = {"layers.0.": "transformer.", "fc.": "fusion_fc."}
        tensors = {}
        for name, tensor in self.state_dict().items():
            old = next((old for old in names if name.startswith(old)), "")
            tensors[names.get(old, "") + name.removeprefix(old)] = tensor.contiguous()
        return self._save(folder, config | settings, tensors)

    def _config(self) -> dict[str, Any]:
        return self.config.to_dict() | {"model_type": "llama"}

    def _save(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder
