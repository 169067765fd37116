"""The training loop: frozen target, MTP layers, resumable, the best by held-out acceptance kept."""

import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiercel.core.config import at_least
from tiercel.core.errors import UserError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.decoder import Decoder
from tiercel.models.description import MtpDescription
from tiercel.models.mtp import MtpDraft, MtpLayer
from tiercel.models.mtp_checkpoint import load_draft, read_description, read_provenance, resolve_draft, save_draft
from tiercel.train.data import Conversation, draft_vocabulary, pad, split_held_out, token_batches
from tiercel.train.hidden_states import HiddenStateCache
from tiercel.train.objective import Acceptance, LayerLosses, layer_losses, measure


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of one training run; all of them are written into the checkpoint.

    Args:
        layers: MTP layers to train.
        tokens: trained tokens in all (prompt tokens that pass through the layers included).
        batch_tokens: padded tokens per step, about.
        learning_rate: peak rate of AdamW for norms, and of Muon (Jordan et al., 2024) for matrices.
        warmup: share of ``tokens`` with a rising rate.
        decay: share of ``tokens`` at the end with a linearly falling rate.
        untie_at: share of ``tokens`` after which the layers, one shared module until then, go their own ways.
        prompt_share: share of the prompt tokens whose prediction counts, drawn anew for every batch; answers count in full.
        draft_vocab_size: tokens the draft can propose.
        max_length: conversations are cut to so many tokens.
        held_out: greedy conversations set aside to measure acceptance.
        evaluate_every: steps between two measurements (each also saves the state).
        seed: of the order of batches.
        init: a draft (folder, or name of a shipped one) whose layers this run starts from; they are apart from the start, so
            ``untie_at`` has no say. The draft vocabulary still comes from this run's data.

    Raises:
        UserError: a value is outside its range; the message names the setting.
    """

    layers: int = 3
    tokens: int = 4_000_000
    batch_tokens: int = 2400
    learning_rate: float = 8e-3
    warmup: float = 0.02
    decay: float = 0.3
    untie_at: float = 0.5
    prompt_share: float = 0.3
    draft_vocab_size: int = 8192
    max_length: int = 1024
    held_out: int = 60
    evaluate_every: int = 100
    seed: int = 0
    init: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "tokens",
            "batch_tokens",
            "draft_vocab_size",
            "max_length",
            "held_out",
            "evaluate_every",
        ):
            at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "warmup", "decay"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)} is not allowed: give a number above 0")
        for name in ("untie_at", "prompt_share"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name}={getattr(self, name)} is not allowed: give a number of at least 0")


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop tells its caller after every step (``acceptance`` only where it was measured)."""

    step: int
    tokens: int
    learning_rate: float
    losses: LayerLosses
    acceptance: Acceptance | None
    best_length: float
    tokens_per_second: float


class Trainer:
    """Trains a draft for one target; ``run`` resumes where the state in ``out`` stopped.

    ``out`` receives ``best/`` (a draft folder), ``state.pt`` (resume) and ``log.jsonl``; ``cache`` keeps hidden states.

    Raises:
        UserError: too little data, a cache or state that belongs to something else, or an ``init`` that does not fit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Decoder,
        conversations: list[Conversation],
        out: Path,
        cache: Path,
        config: TrainConfig,
        data_names: list[str],
    ) -> None:
        self.target, self.out, self.config, self.data_names = target, out, config, data_names
        self.conversations, self.held_out = split_held_out(conversations, config.held_out)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from error
        self.cache = HiddenStateCache(cache, target, checkpoint.fingerprint, self.conversations + self.held_out)
        first = self.cache.batch(list(range(min(8, len(self.conversations))))).float()
        self.input_rms = float(first[first.abs().sum(-1) > 0].square().mean(-1).sqrt().mean())
        self.draft = new_draft(checkpoint, target, self.conversations, config, self.input_rms)
        self.init_provenance = self._start_from(config.init, checkpoint) if config.init else None
        self.step, self.tokens, self.best_length = 0, 0, 0.0
        self.optimizers = self._new_optimizers()
        if (out / "state.pt").exists():
            self._resume()

    def run(self, report: Callable[[Progress], None]) -> None:
        """Train until ``config.tokens`` are done, measuring, saving and reporting on the way."""
        while self.tokens < self.config.tokens:
            epoch, position = self._place()
            batches = token_batches(self.conversations, self.config.batch_tokens, self.config.seed + epoch)
            for indices in batches[position:]:
                report(self._step(indices))
                if self.tokens >= self.config.tokens:
                    break

    def _start_from(self, init: str, checkpoint: Checkpoint) -> dict[str, Any]:
        folder = resolve_draft(init, checkpoint)
        theirs, mine = read_description(folder), self.draft.description
        if replace(theirs, draft_vocab_size=mine.draft_vocab_size) != mine:
            raise UserError(
                f"draft {folder} has another shape than {mine.num_layers} MTP layers of this target: fit --layers to it"
            )
        self.draft.layers = nn.ModuleList(MtpLayer(mine) for _ in range(mine.num_layers))
        self.draft.layers.load_state_dict(load_draft(folder, checkpoint, self.target).layers.state_dict())
        return read_provenance(folder)

    def _place(self) -> tuple[int, int]:
        # Every epoch has as many batches as the first: their sizes depend on the lengths alone.
        per_epoch = len(token_batches(self.conversations, self.config.batch_tokens, self.config.seed))
        return divmod(self.step, per_epoch)

    def _step(self, indices: list[int]) -> Progress:
        started = time.monotonic()
        batch = [self.conversations[i] for i in indices]
        if self.tokens >= self.config.untie_at * self.config.tokens:
            self._untie()
        rate = self._set_rate()
        generator = torch.Generator().manual_seed(self.config.seed + self.step)
        with torch.autocast("cpu", torch.bfloat16):
            hidden, weights = self.cache.batch(indices), self._weights(batch, generator)
            losses = layer_losses(self.draft, self.target, pad(batch), hidden, weights, generator)
        losses.total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        count = sum(map(len, batch))
        self.tokens += count
        acceptance = None
        if self.step % self.config.evaluate_every == 0 or self.tokens >= self.config.tokens:
            acceptance = self._measure_and_save()
        speed = count / (time.monotonic() - started)
        progress = Progress(self.step, self.tokens, rate, losses, acceptance, self.best_length, speed)
        self._log(progress)
        return progress

    def _weights(self, batch: list[Conversation], generator: torch.Generator) -> Tensor:
        weights = torch.rand(len(batch), max(map(len, batch)), generator=generator).lt(self.config.prompt_share).float()
        for row, conversation in enumerate(batch):
            weights[row, conversation.answer_start : len(conversation)] = 1.0
            weights[row, len(conversation) :] = 0.0
        return weights

    def _set_rate(self) -> float:
        done = self.tokens / self.config.tokens
        scale = min(1.0, (done + 1e-3) / self.config.warmup, max(1 - done, 0.01) / self.config.decay)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * scale * self.config.learning_rate
        return scale * self.config.learning_rate

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        named = list(self.draft.layers.named_parameters())
        matrices = [
            {"params": [p], "scale": self.input_rms if "eh_proj" in n else 1.0} for n, p in named if p.dim() == 2
        ]
        vectors = [{"params": [p], "scale": 1.0} for _, p in named if p.dim() == 1]
        muon = torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(vectors, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)]

    @property
    def is_tied(self) -> bool:
        """Whether the layers are still one shared module."""
        return len({id(layer) for layer in self.draft.layers}) < len(self.draft.layers)

    def _untie(self) -> None:
        if not self.is_tied:
            return
        shared = self.draft.layers[0]
        old = {id(p): o.state[p] for o in self.optimizers for p in shared.parameters() if p in o.state}
        self.draft.layers = nn.ModuleList(copy.deepcopy(shared) for _ in self.draft.layers)
        self.optimizers = self._new_optimizers()
        for layer in self.draft.layers:  # each copy goes on with the shared layer's moments
            for mine, theirs in zip(layer.parameters(), shared.parameters(), strict=True):
                owner = self.optimizers[0] if mine.dim() == 2 else self.optimizers[1]
                if id(theirs) in old:
                    owner.state[mine] = copy.deepcopy(old[id(theirs)])

    def _measure_and_save(self) -> Acceptance:
        first = len(self.conversations)
        hidden = [self.cache.batch([first + i])[0] for i in range(len(self.held_out))]
        with torch.autocast("cpu", torch.bfloat16):
            acceptance = measure(self.draft, self.held_out, hidden)
        if acceptance.length > self.best_length:
            self.best_length = acceptance.length
            save_draft(self.draft, self.out / "best", self._provenance(acceptance))
        self._save_state()
        return acceptance

    def _provenance(self, acceptance: Acceptance) -> dict[str, Any]:
        return {
            "settings": asdict(self.config),
            "init": self.init_provenance,
            "data": self.data_names,
            "conversations": len(self.conversations),
            "steps": self.step,
            "trained_tokens": self.tokens,
            "held_out": {
                "conversations": len(self.held_out),
                "acceptance_length": acceptance.length,
                "position_acceptance": acceptance.position,
                "layer_accuracy": acceptance.accuracy,
            },
        }

    def _save_state(self) -> None:
        state = {
            "config": asdict(self.config),
            "step": self.step,
            "tokens": self.tokens,
            "best_length": self.best_length,
            "tied": self.is_tied,
            "d2t": self.draft.d2t,
            "layers": self.draft.layers.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        torch.save(state, self.out / "state.pt.part")
        os.replace(self.out / "state.pt.part", self.out / "state.pt")

    def _resume(self) -> None:
        state = torch.load(self.out / "state.pt", weights_only=True)
        free = ("tokens", "learning_rate", "warmup", "decay", "untie_at", "evaluate_every")
        kept = TrainConfig(**state["config"])
        changed = {name: getattr(self.config, name) for name in free}
        if replace(kept, **changed) != self.config:
            raise UserError(f"{self.out} was begun with other settings ({kept}): only {', '.join(free)} may change")
        if not torch.equal(state["d2t"], self.draft.d2t):
            raise UserError(f"{self.out} was begun with another draft vocabulary: choose another --out")
        if not state["tied"]:
            self._untie()
        self.draft.layers.load_state_dict(state["layers"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.best_length = state["step"], state["tokens"], state["best_length"]

    def _log(self, progress: Progress) -> None:
        row = {
            "step": progress.step,
            "tokens": progress.tokens,
            "lr": progress.learning_rate,
            "cross_entropy": progress.losses.cross_entropy,
            "agreement": progress.losses.agreement,
            "tokens_per_second": progress.tokens_per_second,
        }
        if progress.acceptance:
            row |= {"acceptance_length": progress.acceptance.length, "position": progress.acceptance.position}
            row |= {"layer_accuracy": progress.acceptance.accuracy}
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def new_draft(
    checkpoint: Checkpoint, target: Decoder, data: list[Conversation], config: TrainConfig, input_rms: float
) -> MtpDraft:
    """An untrained draft: one layer, shared by every position, started from the target's last layer.

    ``eh_proj`` starts as ``[0.5 c I, c I]`` with c the root mean square of that layer's usual input, so that its decoder
    layer begins with inputs of the size it knows.
    """
    body = checkpoint.description
    description = MtpDescription(
        num_layers=config.layers,
        chained=True,
        body=body,
        target_hidden_size=body.hidden_size,
        hidden_before_final_norm=True,
        embedding_first=True,
        draft_vocab_size=config.draft_vocab_size,
        target_fingerprint=checkpoint.fingerprint,
    )
    draft = MtpDraft(description, draft_vocabulary(data, config.draft_vocab_size, body.vocab_size))
    layer: MtpLayer = draft.layers[0]  # type: ignore[assignment]
    layer.body.load_state_dict(target.layers[-1].state_dict())
    layer.final_layernorm.load_state_dict(target.norm.state_dict())
    with torch.no_grad():
        eye = torch.eye(body.hidden_size)
        layer.eh_proj.weight.copy_(input_rms * torch.cat((0.5 * eye, eye), dim=1))
    draft.layers = nn.ModuleList([layer] * config.layers)
    draft.share(target)
    return draft
