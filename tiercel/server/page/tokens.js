// Tokens, coloured by who proposed them.

const LAYER_LOOKS = 4; // more layers start over, as in the report
const NAMED = { "-3": ["lookup", "prompt lookup"], "-2": ["prefill", "prefill"], "-1": ["bonus", "bonus token"] };

export function look(source) {
  return NAMED[source]?.[0] ?? `layer${(source % LAYER_LOOKS) + 1}`;
}

export function sourceName(source) {
  return NAMED[source]?.[1] ?? `MTP layer ${source + 1}`;
}

function visible(text) {
  return text.replaceAll("\n", "⏎\n") || "·"; // a part of a character shows with its last token
}

export function tokenSpan(token, part, fate = "") {
  const span = document.createElement("span");
  span.className = `${look(token.source)} ${fate}`;
  span.textContent = visible(token.text);
  const where = part.round === undefined ? "" : `, round ${part.round}`;
  span.title = `${sourceName(token.source)}${fate ? ", rejected" : ""}, id ${token.id}${where}`;
  return span;
}

// A round's tokens: what was delivered, the rejected drafts in front of the bonus token that stands in their place.
export function roundSpans(part) {
  const wrong = (part.drafts ?? []).slice(part.num_correct_drafts ?? 0).map((draft) => tokenSpan(draft, part, "wrong"));
  const right = part.tokens.map((token) => tokenSpan(token, part));
  const numAccepted = Math.min(part.num_correct_drafts ?? 0, right.length);
  return [...right.slice(0, numAccepted), ...wrong, ...right.slice(numAccepted)];
}

// Keeps an element's tokens those of a request, adding what is new.
export class TokenFlow {
  constructor(element) {
    this.element = element;
    this.show(null);
  }

  show(request) {
    this.request = request;
    this.numShown = 0;
    this.element.replaceChildren();
  }

  update() {
    const fresh = this.request?.parts.slice(this.numShown) ?? [];
    if (fresh.length && !this.numShown) this.element.replaceChildren(); // text that stood in for rounds not seen yet
    this.numShown += fresh.length;
    this.element.append(...fresh.flatMap(roundSpans));
  }
}

export function legend(sources) {
  return sources.map((source) => {
    const span = document.createElement("span");
    span.className = look(source);
    span.textContent = sourceName(source);
    return span;
  });
}
