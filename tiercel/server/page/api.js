// The server that sent this page. Addresses are relative, so that the page works behind a proxy's prefix.

const KEY = "tiercel-api-key"; // for as long as the tab lives

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

// A response that is well; anything else is an ApiError with the server's own words.
export async function call(path, { body, headers = {}, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const sent = { headers, signal };
  if (body !== undefined) {
    sent.method = "POST";
    sent.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, sent);
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // something between us and the server answered: its text is all there is
  }
  throw new ApiError(response.status, message || response.statusText);
}

// Server-sent events of a response: [name, data], data parsed; OpenAI's [DONE] ends them.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      let name = "";
      let data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data === "[DONE]") return;
      if (data) yield [name, JSON.parse(data)];
    }
  }
}
