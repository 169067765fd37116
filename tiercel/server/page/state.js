// What was seen of the engine and its requests: the same objects whether they come from /events or from saved records.

const KEPT_REQUESTS = 100; // older ones that have ended are forgotten
const KEPT_SPEEDS = 120; // a minute
const RECENT_ROUNDS = 200; // what the tiles' acceptance is of

export class Request {
  constructor(id) {
    this.id = id;
    this.parts = []; // chunks of the prompt and rounds, in order
    this.numTokens = 0;
    this.end = null;
  }

  add(part) {
    this.parts.push(part);
    this.numTokens += part.tokens.length;
  }

  get rounds() {
    return this.parts.filter((part) => part.round !== undefined);
  }

  // Delivered tokens per second after the first; the end's own number once there is one.
  get speed() {
    if (this.end) return this.end.tokens_per_second;
    const rounds = this.rounds;
    if (!rounds.length) return null;
    const ms = rounds.at(-1).end_ms - rounds[0].start_ms;
    return (1000 * rounds.reduce((sum, round) => sum + round.tokens.length, 0)) / ms;
  }

  get status() {
    if (!this.end) return this.parts.length ? "running" : "waiting";
    return this.end.error ? `failed: ${this.end.error}` : this.end.finish_reason;
  }
}

// Positions that a round's drafts reach: their number, unless they form a tree.
export function depthOf(drafts, parents) {
  if (!parents.length) return drafts.length;
  const depths = [];
  for (const parent of parents) depths.push(parent < 0 ? 1 : depths[parent] + 1);
  return Math.max(...depths);
}

// Counted as in the responses (docs/design.md): correct drafts hold no bonus token; a position's share is unconditional (of all
// rounds) or conditional (of those that came to it because every draft before was correct).
export function acceptance(rounds) {
  let proposed = 0;
  let correct = 0;
  const right = [];
  const reached = [];
  for (const round of rounds) {
    proposed += round.drafts.length;
    correct += round.num_correct_drafts;
    const depth = depthOf(round.drafts, round.draft_parents);
    for (let i = 0; i < depth && i <= round.num_correct_drafts; i++) {
      reached[i] = (reached[i] ?? 0) + 1;
      right[i] = (right[i] ?? 0) + (i < round.num_correct_drafts ? 1 : 0);
    }
  }
  const count = rounds.length;
  return {
    rounds: count,
    proposed,
    correct,
    rate: proposed ? correct / proposed : null,
    length: count ? 1 + correct / count : null,
    positions: right.map((n, i) => ({ unconditional: n / count, conditional: n / reached[i], reached: reached[i] })),
  };
}

export class State {
  constructor() {
    this.requests = new Map();
    this.engine = null;
    this.speeds = [];
    this.recent = [];
    this.sources = new Set(); // who proposed tokens or drafts that were seen
  }

  request(id) {
    let found = this.requests.get(id);
    if (!found) {
      found = new Request(id);
      this.requests.set(id, found);
      this.forget();
    }
    return found;
  }

  take(name, data) {
    if (name === "engine") {
      this.engine = data;
      this.speeds.push(data.tokens_per_second);
      if (this.speeds.length > KEPT_SPEEDS) this.speeds.shift();
    } else if (name === "step") {
      const { requests, ...step } = data;
      for (const part of requests) {
        this.request(part.request_id).add({ ...step, ...part });
        for (const token of [...part.tokens, ...(part.drafts ?? [])]) this.sources.add(token.source);
        if (part.round !== undefined) this.recent.push(part);
      }
      this.recent.splice(0, this.recent.length - RECENT_ROUNDS);
    } else if (name === "end") {
      this.request(data.request_id).end = data;
    }
  }

  forget() {
    for (const [id, request] of this.requests) {
      if (this.requests.size <= KEPT_REQUESTS) return;
      if (request.end) this.requests.delete(id);
    }
  }
}
