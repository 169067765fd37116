"""Acceptance, counted once and in one place. Every report, span, record and counter derives from here."""

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class StageTimes:
    """Nanoseconds a request's rounds spent per stage. A batch's stage time counts in full for each request in it."""

    draft: int = 0
    verify: int = 0
    draft_extend: int = 0
    other: int = 0

    def add(self, stage_ns: dict[str, int]) -> None:
        """Add one round's exclusive nanoseconds, by stage name."""
        self.draft += stage_ns["draft"]
        self.verify += stage_ns["verify"]
        self.draft_extend += stage_ns["draft_extend"]
        self.other += stage_ns["other"]

    def as_ms(self) -> dict[str, float]:
        """Milliseconds per stage, under the stage's name."""
        return {name: ns / 1e6 for name, ns in asdict(self).items()}


@dataclass(slots=True)
class SpecCounts:
    """Raw counts of one request (or, added up, of many), one list entry per round.

    ``proposed[r]`` drafts were really proposed in round r, ``correct[r]`` of them were accepted (no bonus), and
    ``emitted[r]`` tokens reached the user (bonus included, after any stop or length cut).
    ``depths[r]`` positions were drafted for: as many as drafts in a chain, fewer in a tree.
    Invariants: 0 <= correct <= depth <= proposed; 1 <= emitted <= correct + 1.
    """

    proposed: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    stage_ns: StageTimes = field(default_factory=StageTimes)
    depths: list[int] = field(default_factory=list)

    def add_round(self, proposed: int, correct: int, emitted: int, depth: int | None = None) -> None:
        """Count one round; ``depth`` is None for a chain.

        Raises:
            ValueError: the counts do not add up.
        """
        depth = proposed if depth is None else depth
        if not (0 <= correct <= depth <= proposed and 1 <= emitted <= correct + 1):
            raise ValueError(f"a round of {proposed=}, {correct=}, {emitted=}, {depth=} does not add up")
        self.depths.append(depth)
        self.proposed.append(proposed)
        self.correct.append(correct)
        self.emitted.append(emitted)

    def merge(self, other: "SpecCounts") -> None:
        """Append another request's rounds and add its stage times."""
        self.proposed += other.proposed
        self.correct += other.correct
        self.emitted += other.emitted
        self.depths += other.depths
        self.stage_ns.add(asdict(other.stage_ns))

    @property
    def num_rounds(self) -> int:
        return len(self.correct)

    @property
    def max_depth(self) -> int:
        """Deepest draft of any round: the number of positions that can be reported."""
        return max(self.depths, default=0)

    def acceptance_rate(self) -> float | None:
        """Σ correct / Σ proposed, in [0, 1]; None if nothing was proposed."""
        total = sum(self.proposed)
        return sum(self.correct) / total if total else None

    def acceptance_length(self) -> float | None:
        """1 + Σ correct / rounds (bonus included); None if there was no round."""
        return 1 + sum(self.correct) / self.num_rounds if self.num_rounds else None

    def emitted_per_round(self) -> float | None:
        """Σ emitted / rounds; None if there was no round."""
        return sum(self.emitted) / self.num_rounds if self.num_rounds else None

    def histogram(self, num_steps: int) -> list[int]:
        """Rounds by number of correct drafts, dense, length ``num_steps + 1``; sums to the number of rounds."""
        counts = [0] * (num_steps + 1)
        for correct in self.correct:
            counts[correct] += 1
        return counts

    def position_acceptance(self, num_steps: int) -> list[float | None]:
        """Unconditional: share of all rounds whose draft i was correct, i = 0..num_steps-1."""
        if not self.num_rounds:
            return [None] * num_steps
        return [sum(c > i for c in self.correct) / self.num_rounds for i in range(num_steps)]

    def conditional_acceptance(self, num_steps: int) -> list[float | None]:
        """EAGLE's alpha: among rounds that drafted for position i and whose drafts before i were all correct."""
        shares: list[float | None] = []
        for i in range(num_steps):
            reached = [c for depth, c in zip(self.depths, self.correct, strict=True) if depth > i and c >= i]
            shares.append(sum(c > i for c in reached) / len(reached) if reached else None)
        return shares

    def to_metrics(self, num_steps: int, detailed: bool = False) -> dict[str, object]:
        """The API's ``metrics.speculative_decoding`` object: vLLM's names, plus ours.

        Args:
            num_steps: configured maximum depth K; the length of the per-position arrays.
            detailed: add ``per_step_accepted`` and ``per_step_drafted``.
        """
        metrics: dict[str, object] = {
            "mean_acceptance_length": self.acceptance_length(),
            "draft_acceptance_rate": self.acceptance_rate(),
            "acceptance_histogram": self.histogram(num_steps),
            "num_spec_steps": self.num_rounds,
            "num_accepted_draft_tokens": sum(self.correct),
            "num_draft_tokens": sum(self.proposed),
            "num_spec_tokens": num_steps,
            "num_emitted_tokens": sum(self.emitted),
            "per_position_acceptance": self.position_acceptance(num_steps),
            "per_position_conditional_acceptance": self.conditional_acceptance(num_steps),
            "stage_time_ms": self.stage_ns.as_ms(),
        }
        if detailed:
            metrics["per_step_accepted"] = list(self.correct)
            metrics["per_step_drafted"] = list(self.proposed)
        return metrics
