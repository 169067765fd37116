// The panels around the chat: tiles, requests, acceptance by position.

import { acceptance } from "./state.js";
import { look } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(0)}%`);
const NONE = "–";

function spark(values) {
  const top = Math.max(...values, 1);
  const points = values.map((value, i) => `${i},${(20 - (18 * value) / top).toFixed(1)}`).join(" ");
  const svg = $("spark");
  svg.setAttribute("viewBox", `0 0 ${Math.max(values.length - 1, 1)} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  const line = svg.firstElementChild ?? svg.appendChild(document.createElementNS(svg.namespaceURI, "polyline"));
  line.setAttribute("points", points);
}

export function showTiles({ engine, speeds, recent }) {
  if (!engine) return;
  const counts = acceptance(recent);
  $("speed").textContent = engine.tokens_per_second.toFixed(1);
  $("load").textContent = `${engine.running}, ${engine.waiting}`;
  $("kv").textContent = `${engine.kv_slots_used} / ${engine.kv_slots}`;
  $("kv-meter").value = engine.kv_slots ? engine.kv_slots_used / engine.kv_slots : 0;
  $("length").textContent = counts.length?.toFixed(2) ?? NONE;
  $("length-of").textContent = counts.rounds ? `last ${counts.rounds} rounds` : "no round yet";
  $("rate").textContent = percent(counts.rate);
  $("rate-of").textContent = counts.proposed ? `${counts.correct} of ${counts.proposed} drafts` : "no draft yet";
  spark(speeds);
}

// Buttons are kept from drawing to drawing, so that the focus stays.
const buttons = new Map();

export function showRequests(state, chosen, choose) {
  for (const [id, item] of buttons) {
    if (state.requests.has(id)) continue;
    item.remove();
    buttons.delete(id);
  }
  for (const [id, request] of state.requests) {
    let item = buttons.get(id);
    if (!item) {
      item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.append(document.createElement("span"), document.createElement("span"));
      button.addEventListener("click", () => choose(request));
      item.append(button);
      buttons.set(id, item);
      $("requests").prepend(item);
    }
    const button = item.firstElementChild;
    const speed = request.speed;
    button.setAttribute("aria-current", request === chosen);
    button.firstChild.textContent = id;
    button.lastChild.textContent = `${request.status} · ${request.numTokens} tokens${speed ? ` · ${speed.toFixed(0)}/s` : ""}`;
  }
}

function bar(share) {
  const element = document.createElement("i");
  element.style.width = `${100 * share}%`;
  return element;
}

export function showPositions(request) {
  const { positions, proposed, correct, rounds } = acceptance(request?.rounds ?? []);
  $("positions-of").textContent = proposed
    ? `${correct} of ${proposed} drafts correct in ${rounds} rounds. Solid: of all rounds; pale: of those that came to it.`
    : "Nothing was drafted for the chosen request.";
  $("positions").replaceChildren(
    ...positions.map(({ unconditional, conditional }, i) => {
      const row = document.createElement("div");
      row.className = `position ${look(i)}`;
      const [name, bars, value] = ["span", "div", "span"].map((tag) => document.createElement(tag));
      name.textContent = `draft ${i + 1}`;
      bars.append(bar(unconditional), bar(conditional));
      value.textContent = `${percent(unconditional)}, reached ${percent(conditional)}`;
      row.append(name, bars, value);
      return row;
    }),
  );
}
