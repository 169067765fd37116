"""Depth that pays: how many MTP layers draft (K), chosen per batch from what rounds cost and how often drafts were right lately.

With K layers a round brings each request 1 + P(draft 1 right) + … + P(the first K right) tokens. What it costs is measured by
load, since a row more in a verify is nearly free on one machine, and half a step on another. The K that brings most tokens per
second is in force until another promises ``MARGIN`` more. Output does not depend on it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from tiercel.core.batch import ForwardMode, StepRecord
from tiercel.core.depths import DepthChoice, DepthTable
from tiercel.core.request import SOURCE_NGRAM

MARGIN = 1.03
"""How much faster another K must promise to be: less is noise of the estimates, and every change makes layers catch up."""
EVERY = 4
"""Rounds between two decisions."""
TRIAL, TRIAL_AT_MOST, SETTLING = 8, 40, 2
"""Rounds in which a K is measured that has not run at this load, or not lately; the first of them (``SETTLING``) do not count.
Rounds that prompt lookup takes tell nothing, so a trial may end with fewer."""
REFRESH_FIRST, REFRESH_MOST, REFRESH_WITHIN = 64, 2048, 0.85
"""Rounds after which a K that comes close to the one in force is measured again; doubles from time to time."""
BASELINE_AFTER = 16
"""Rounds with drafts after which plain rounds are measured: everything is compared with them."""
PROBE_FIRST, PROBE_MOST = 12, 96
"""Plain rounds before the first layer is asked again what it would have drafted; doubles from probe to probe."""
HOPE = 0.25
"""A probe is worth its time if so much more acceptance than is known of would make drafting pay."""
LAYER_COST = 0.4
"""What a layer adds to a plain round, where nothing like it has been measured yet."""
DECAY = 0.8
"""Acceptance of a position over that of the one before, where it has not been measured yet: high enough to be measured at all
where the first drafts are mostly right."""


@dataclass(slots=True)
class Share:
    """How many of the latest trials came out right; a trial counts ``keep`` times as much as the one after it."""

    keep: float
    right: float = 0.0
    trials: float = 0.0

    def add(self, is_right: bool) -> None:
        """One more."""
        self.right = self.right * self.keep + is_right
        self.trials = self.trials * self.keep + 1

    def beside(self, prior: float, weight: float) -> float:
        """The share, a ``prior`` counted in as ``weight`` trials."""
        return (self.right + prior * weight) / (self.trials + weight)


class RunningAcceptance:
    """Share of rounds whose draft i was correct (drafts not made count as wrong), of each request and of all together.

    A request is judged by the others' rounds until it has enough of its own.
    """

    PRIOR, PRIOR_WEIGHT, DEEPER_WEIGHT = 0.45, 16.0, 4.0
    ALL_KEEP, OWN_KEEP, OTHERS_WEIGHT = 0.998, 0.97, 12.0

    def __init__(self, num_layers: int) -> None:
        self.all = [Share(self.ALL_KEEP) for _ in range(num_layers)]
        self.own: dict[str, list[Share]] = {}

    def add(self, request_id: str, correct: Iterable[bool]) -> None:
        """One round's drafts of a request, by position."""
        own = self.own.setdefault(request_id, [Share(self.OWN_KEEP) for _ in self.all])
        for position, is_right in enumerate(correct):
            self.all[position].add(is_right)
            own[position].add(is_right)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.own.pop(request_id, None)

    def of(self, request_id: str) -> list[float]:
        """By position, never rising."""
        own, shares, last = self.own.get(request_id), list[float](), 1.0
        for position, everyone in enumerate(self.all):
            if position:
                prior = everyone.beside(last * DECAY, self.DEEPER_WEIGHT)
            else:
                prior = everyone.beside(self.PRIOR, self.PRIOR_WEIGHT)
            share = own[position].beside(prior, self.OTHERS_WEIGHT) if own else prior
            last = min(last, share)
            shares.append(last)
        return shares

    def tokens(self, request_ids: Sequence[str], num_steps: int) -> float:
        """Tokens that a round with so many layers is expected to bring to these requests together."""
        return sum(1 + sum(self.of(request_id)[:num_steps]) for request_id in request_ids)


class RoundCosts:
    """Nanoseconds of a round at one load, by layers: the step less its draft extend, and the draft extend; medians of the latest.

    The former grows with the context and with whatever else the machine does: what is measured at the K in force moves the others
    in proportion.
    """

    LATEST = 15

    def __init__(self) -> None:
        self._verify: dict[int, list[float]] = {}
        self._extend: dict[int, list[float]] = {}

    def measure_anew(self, num_steps: int) -> None:
        """Forget what is known of so many layers."""
        self._verify.pop(num_steps, None)
        self._extend.pop(num_steps, None)

    def add_verify(self, num_steps: int, ns: float, *, in_force: bool) -> None:
        """A step that verified the drafts of so many layers."""
        latest = self._verify.setdefault(num_steps, [])
        before = median(latest) if latest else 0.0
        self._add(latest, ns)
        if before and in_force:
            factor = median(latest) / before
            for other in self._verify.keys() - {num_steps}:
                self._verify[other] = [value * factor for value in self._verify[other]]

    def add_extend(self, num_steps: int, ns: float) -> None:
        """A draft extend of so many layers."""
        self._add(self._extend.setdefault(num_steps, []), ns)

    def of(self, num_steps: int) -> float | None:
        """A whole round; None where it has not been measured."""
        verify, extend = self._verify.get(num_steps), self._extend.get(num_steps)
        return median(verify) + median(extend) if verify and extend else None

    def relative(self, num_steps: int) -> float | None:
        """To a plain round."""
        plain, whole = self.of(0), self.of(num_steps)
        return whole / plain if whole and plain else None

    def _add(self, latest: list[float], ns: float) -> None:
        latest.append(ns)
        del latest[: -self.LATEST]


@dataclass(slots=True)
class Load:
    """What is known, and in force, at one load."""

    num_steps: int
    costs: RoundCosts = field(default_factory=RoundCosts)
    reason: str = "start"
    rounds: int = 0
    trial: int | None = None
    trial_rounds: int = 0
    trial_samples: int = 0
    plain_rounds: int = 0
    probe_after: int = PROBE_FIRST
    refresh_after: dict[int, tuple[int, int]] = field(default_factory=dict)
    requests: frozenset[str] = frozenset()

    def begin_trial(self, num_steps: int) -> None:
        """Measure so many layers from the next draft extend on."""
        self.trial, self.trial_rounds, self.trial_samples = num_steps, 0, 0
        self.costs.measure_anew(num_steps)
        _, pause = self.refresh_after.get(num_steps, (0, REFRESH_FIRST // 2))
        pause = min(2 * pause, REFRESH_MOST)
        self.refresh_after[num_steps] = self.rounds + pause, pause

    @property
    def due(self) -> list[int]:
        """Layers whose costs were measured some time ago."""
        return [k for k, (at, _) in self.refresh_after.items() if self.rounds >= at]


class AdaptiveDepth:
    """Chooses K.

    Args:
        num_layers: most that K may be.
        table: where to begin at a load that nothing is known about.
    """

    def __init__(self, num_layers: int, table: DepthTable) -> None:
        self.num_layers, self.table = num_layers, table
        self.acceptance = RunningAcceptance(num_layers)
        self.loads: dict[int, Load] = {}
        self._verifying: int | None = None

    def choose(self, num_requests: int) -> DepthChoice:
        """K of the next drafts, with so many requests at once; a probe asks the first layer alone."""
        load = self._load(num_requests)
        if load.trial is not None:
            return DepthChoice(load.trial, "measure")
        if load.num_steps == 0 and load.plain_rounds >= load.probe_after and self._may_pay(num_requests, load):
            return DepthChoice(0, "probe")
        return DepthChoice(load.num_steps, load.reason)

    def scored(self, request_id: str, correct: Sequence[bool]) -> None:
        """What the first layer would have drafted in rounds without drafts was right, or not."""
        for is_right in correct:
            self.acceptance.add(request_id, [is_right])

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.acceptance.forget(request_id)

    def observe(self, record: StepRecord) -> None:
        """Learn from a step, and decide every few rounds."""
        verified, self._verifying = self._verifying, None
        if record.mode is not ForwardMode.DECODE or not record.rounds:
            return
        load, is_probe = self._load(len(record.rounds)), record.depth_reason == "probe"
        self._verifying = None if is_probe else record.num_steps
        self._learn_acceptance(record, verified or 0)
        self._count(load, record)
        looked_up = sum(SOURCE_NGRAM in done.draft_layers for done in record.rounds)
        if verified is not None and not is_probe and looked_up * 4 <= len(record.rounds):
            self._learn_costs(load, record, verified)
        if load.trial is None:
            if load.rounds % EVERY == 0:
                self._decide([done.request_id for done in record.rounds], load)
        elif load.trial_samples >= TRIAL or load.trial_rounds >= TRIAL_AT_MOST:
            load.trial = None
            self._decide([done.request_id for done in record.rounds], load)

    def _learn_acceptance(self, record: StepRecord, num_steps: int) -> None:
        for done in record.rounds:
            if done.draft_layers and SOURCE_NGRAM not in done.draft_layers:
                depth = max(num_steps, len(done.draft_layers))
                self.acceptance.add(done.request_id, [i < done.num_correct_drafts for i in range(depth)])

    def _learn_costs(self, load: Load, record: StepRecord, verified: int) -> None:
        if load.trial is not None:
            load.trial_samples += verified == record.num_steps == load.trial
            if load.trial_samples <= SETTLING:
                return
        extend = record.draft_extend_end_ns - record.draft_extend_start_ns
        in_force = load.trial is None and verified == load.num_steps
        load.costs.add_verify(verified, record.end_ns - record.start_ns - extend, in_force=in_force)
        load.costs.add_extend(record.num_steps, extend)

    def _count(self, load: Load, record: StepRecord) -> None:
        requests = frozenset(done.request_id for done in record.rounds)
        if not requests <= load.requests:
            load.probe_after, load.plain_rounds = PROBE_FIRST, 0
        load.requests = requests
        load.rounds += 1
        load.trial_rounds += load.trial is not None
        load.plain_rounds = 0 if record.num_steps else load.plain_rounds + 1
        if record.depth_reason == "switched":
            load.reason = "kept"
        elif record.depth_reason == "probe":
            load.plain_rounds, load.probe_after = 0, min(2 * load.probe_after, PROBE_MOST)

    def _decide(self, request_ids: list[str], load: Load) -> None:
        now = load.num_steps
        rates = {k: self.acceptance.tokens(request_ids, k) / self._cost(k, load) for k in range(self.num_layers + 1)}
        best = max(rates, key=lambda k: (rates[k], -k))
        load.reason = "kept"
        if now and load.costs.of(0) is None and load.rounds >= BASELINE_AFTER:
            load.begin_trial(0)
        elif rates[best] > MARGIN * rates[now]:
            if load.costs.of(best) is None:
                load.begin_trial(best)
            else:
                load.num_steps, load.reason = best, "switched"
                load.probe_after, load.plain_rounds = PROBE_FIRST, 0
        else:
            close = [k for k in load.due if k != now and rates[k] >= REFRESH_WITHIN * rates[now]]
            if close:
                load.begin_trial(close[0])

    def _cost(self, num_steps: int, load: Load) -> float:
        """Of a round, in units that are the same for every K of this load."""
        measured = load.costs.of(num_steps)
        if measured is not None:
            return measured
        known = load.costs.of(load.num_steps)
        if known is None:
            return self._relative(num_steps, load)
        return known * self._relative(num_steps, load) / self._relative(load.num_steps, load)

    def _relative(self, num_steps: int, load: Load) -> float:
        """To a plain round: as measured at this load, else at the next smaller one, where rows cost less."""
        for size in sorted(self.loads, reverse=True):
            if size <= self._size_of(load):
                relative = self.loads[size].costs.relative
                for known in range(num_steps, 0, -1):
                    if found := relative(known):
                        return 1 + (found - 1) * num_steps / known
        return 1 + LAYER_COST * num_steps

    def _may_pay(self, num_requests: int, load: Load) -> bool:
        shares = [self.acceptance.of(request_id)[0] for request_id in load.requests] or [self.acceptance.PRIOR]
        hoped = min(1.0, max(shares) + HOPE)
        return 1 + hoped > self._relative(1, load) * MARGIN

    def _load(self, num_requests: int) -> Load:
        size = max(0, num_requests - 1).bit_length()
        if size not in self.loads:
            self.loads[size] = Load(min(self.num_layers, self.table.at(num_requests).num_steps))
        return self.loads[size]

    def _size_of(self, load: Load) -> int:
        return next(size for size, other in self.loads.items() if other is load)
