// Wires the page: the feed of events into the state, the state into what is shown, at most ten times a second.

import { call, eventsOf, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { showPositions, showRequests, showTiles } from "./panels.js";
import { State } from "./state.js";
import { legend, TokenFlow } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const REDRAW_MS = 100;
const RETRY_MS = 1500;

const state = new State();
const watchedTokens = new TokenFlow($("watched-tokens"));
let chosen = null;
let drawing = 0;
let leaving = new AbortController();

function choose(request) {
  chosen = request;
  watchedTokens.show(request);
  draw();
}

const chat = new Chat(state, choose);

function draw() {
  drawing ||= setTimeout(() => {
    drawing = 0;
    showTiles(state);
    $("key").replaceChildren(...legend([...state.sources].sort((a, b) => a - b)));
    showRequests(state, chosen, choose);
    showPositions(chosen);
    watchedTokens.element.classList.toggle("rejected", $("show-rejected").checked);
    watchedTokens.update();
    if (chosen) {
      $("watched-title").textContent = chosen.id;
      $("watched-about").textContent = `${chosen.status} · ${chosen.numTokens} tokens in ${chosen.rounds.length} rounds`;
    }
    chat.update();
  }, REDRAW_MS);
}

function say(text, isGood) {
  $("state").textContent = text;
  $("state").className = `soft ${isGood ? "good" : "bad"}`;
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function askForKey() {
  $("key-dialog").showModal();
  await new Promise((resolve) => $("key-dialog").addEventListener("close", resolve, { once: true }));
  useKey($("api-key").value);
  $("api-key").value = "";
}

async function learnModel() {
  const { data } = await (await call("v1/models")).json();
  const [{ id, root, max_model_len: length, speculation }] = data;
  chat.model = id;
  const who = speculation.num_steps ? `${speculation.method}, K ≤ ${speculation.num_steps}` : "plain decoding";
  $("about").textContent = `${id}${root === id ? "" : ` (${root})`} · ${who} · context ${length}`;
  const slider = $("num-steps");
  slider.max = speculation.num_steps;
  slider.value = speculation.num_steps;
  slider.min = Math.min(1, speculation.num_steps);
  slider.disabled = $("speculate").disabled = speculation.num_steps === 0;
  if (speculation.num_steps === 0) $("speculate").checked = false;
  $("max-tokens").max = length;
  showDepth();
}

function showDepth() {
  $("num-steps-shown").textContent = $("speculate").checked ? $("num-steps").value : "off";
}

async function watch() {
  const response = await call("events", { signal: leaving.signal });
  notice("");
  for await (const [name, data] of eventsOf(response)) {
    state.take(name, data);
    if (name === "engine") {
      say(data.is_alive ? "engine alive" : "engine dead", data.is_alive);
      if (data.dropped) notice(`${data.dropped} events were lost on the way to this page: some rounds are missing here.`);
    } else if (!chosen && state.requests.size) {
      choose([...state.requests.values()].at(-1));
    }
    draw();
  }
}

async function live() {
  for (;;) {
    try {
      await learnModel();
      await watch();
      say("the server has ended the feed", false);
    } catch (error) {
      if (leaving.signal.aborted) return;
      if (error.status === 401) {
        await askForKey();
        continue;
      }
      say("not connected", false);
      if (error.status === 403) {
        notice(`${error.message}. Answers come without colours.`);
        return;
      }
      notice(error.status ? error.message : "The server does not answer; trying again.");
    }
    await pause(RETRY_MS);
  }
}

for (const id of ["num-steps", "speculate"]) $(id).addEventListener("input", showDepth);
$("show-rejected").addEventListener("change", draw);
// A page that was left may be kept for the way back, with its connections, of which a browser allows six to a server.
addEventListener("pagehide", () => {
  leaving.abort();
  chat.running?.abort();
});
addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  leaving = new AbortController();
  live();
});
live();
