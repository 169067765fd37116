// The conversation: asks the server, shows each answer's tokens as the rounds deliver them, and what the answer cost.

import { ApiError, call, eventsOf } from "./api.js";
import { acceptance } from "./state.js";
import { TokenFlow } from "./tokens.js";

const $ = (id) => document.getElementById(id);

function newName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function line(kind, text = "") {
  const element = document.createElement("p");
  element.className = kind;
  element.textContent = text;
  $("conversation").append(element);
  return element;
}

// What the controls ask for.
function wishes() {
  const maxSteps = Number($("num-steps").max);
  const numSteps = Number($("num-steps").value);
  const isOn = $("speculate").checked;
  const speculative = isOn && numSteps < maxSteps ? { enabled: true, num_steps: numSteps } : { enabled: isOn };
  return {
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    ...(maxSteps ? { speculative } : {}),
  };
}

function said(request, settings, metrics) {
  const counts = acceptance(request.rounds);
  const speed = request.speed ?? metrics?.tokens_per_second;
  const parts = [settings];
  if (speed) parts.push(`${speed.toFixed(1)} tokens/s`);
  if (counts.proposed) parts.push(`acceptance length ${counts.length.toFixed(2)}`);
  if (counts.rounds) parts.push(`${request.numTokens} tokens, ${counts.rounds} rounds`);
  if (request.end?.time_to_first_token_ms) parts.push(`first token ${request.end.time_to_first_token_ms.toFixed(0)} ms`);
  parts.push(request.status);
  return parts.join(" · ");
}

export class Chat {
  // state: where rounds arrive; onAnswer(request): the answer that is being written.
  constructor(state, onAnswer) {
    this.state = state;
    this.onAnswer = onAnswer;
    this.answers = [];
    this.model = undefined;
    this.clear();
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = $("prompt").value.trim();
      if (!text || this.running) return;
      this.messages.push({ role: "user", content: text });
      line("said", text);
      $("prompt").value = "";
      this.answer();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("ask").requestSubmit();
    });
    $("again").addEventListener("click", () => {
      if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
      this.answer();
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    $("show-rejected").addEventListener("change", () => this.update());
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.answers = [];
    $("conversation").replaceChildren();
    this.setRunning(null);
  }

  setRunning(controller) {
    this.running = controller;
    $("send").disabled = $("again").disabled = Boolean(controller);
    $("stop").disabled = !controller;
    if (!this.messages.length) $("again").disabled = true;
  }

  async answer() {
    const controller = new AbortController();
    this.setRunning(controller);
    const name = newName();
    const request = this.state.request(`chatcmpl-${name}`);
    const asked = wishes();
    const k = asked.speculative?.num_steps ?? $("num-steps").max;
    const shown = {
      request,
      flow: new TokenFlow(line("answer tokens")),
      about: line("soft"),
      settings: asked.speculative?.enabled ? `K = ${k}` : "no speculation",
      messages: this.messages,
      text: "",
    };
    shown.flow.show(request);
    this.answers.push(shown);
    this.onAnswer(request);
    try {
      const response = await call("v1/chat/completions", {
        body: { model: this.model, messages: this.messages, stream: true, stream_options: { include_usage: true }, ...asked },
        headers: { "X-Request-Id": name },
        signal: controller.signal,
      });
      for await (const [, data] of eventsOf(response)) {
        if (data.error) throw new ApiError(500, data.error.message);
        shown.text += data.choices[0]?.delta?.content ?? "";
        shown.metrics = data.metrics ?? shown.metrics;
      }
      shown.isWhole = true;
    } catch (error) {
      if (error.name !== "AbortError") {
        line("failed", error.message);
        request.end ??= { error: error.message };
      }
    }
    shown.messages.push({ role: "assistant", content: shown.text });
    if (this.running === controller) this.setRunning(null);
    this.update();
  }

  update() {
    const box = $("conversation");
    const wasAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    for (const shown of this.answers) {
      shown.flow.element.classList.toggle("rejected", $("show-rejected").checked);
      shown.flow.update();
      // Rounds that were not seen (events are off, or this watcher was too slow) leave the text, without colours.
      const isBlind = shown.isWhole && shown.request.numTokens === 0;
      if (isBlind && shown.flow.element.textContent !== shown.text) shown.flow.element.textContent = shown.text;
      shown.about.textContent = said(shown.request, shown.settings, shown.metrics);
    }
    if (wasAtEnd) box.scrollTop = box.scrollHeight;
  }
}
