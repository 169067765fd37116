"""Drafts for measurements of what needs no training: an EAGLE-3 head of random weights, and MTP layers declared unchained."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tiercel.models.checkpoint import Checkpoint
from tiercel.models.eagle import EagleDescription, EagleHead
from tiercel.models.loading import published_tensors
from tiercel.models.mtp_checkpoint import resolve_draft

DRAFT_VOCAB = 8192


def random_eagle3(target: Checkpoint, folder: Path) -> Path:
    """Write an EAGLE-3 head as SafeAILab publishes them, over every sixth token or so of the target's vocabulary."""
    body = replace(target.description, num_layers=1)
    taps = (2, target.description.num_layers // 2, target.description.num_layers - 3)
    ids = torch.linspace(0, body.vocab_size - 1, min(DRAFT_VOCAB, body.vocab_size)).long()
    description = EagleDescription(True, body, body.hidden_size, len(ids), taps, owns_head=True)
    head = EagleHead(description)
    tensors = {name.replace("layer.", "midlayer.", 1): t.contiguous() for name, t in published_tensors(head).items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": body.vocab_size,
        "draft_vocab_size": len(ids),
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_dim": body.head_dim,
        "rope_theta": body.rope_theta,
        "rms_norm_eps": body.rms_norm_eps,
        "max_position_embeddings": body.max_position,
        "eagle_aux_hidden_state_layer_ids": taps,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def unchained(name: str, target: Checkpoint, folder: Path) -> Path:
    """Write the MTP layers called ``name`` again, each reading the target's hidden states."""
    source = resolve_draft(name, target)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | {"chained": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder
