/** Requests to the server that sent this page, and the events of its answers. */

const CUT = "The connection was lost before the answer was complete.";

/** A refusal by the server, or a failed connection; the message is shown to the user. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a request; `path` is relative to the page, which keeps the prefix of a proxy. */
export async function call(path, { key = "", body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) options.body = JSON.stringify(body);
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Failure("The server cannot be reached.");
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `The server answered ${response.status}.`;
  const later = response.headers.get("Retry-After");
  throw new Failure(later ? `${message} (Retry after ${later} s.)` : message, response.status);
}

/** Yield the objects of an event stream; throw if it ends without [DONE] or with an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Failure(CUT);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        if (part === "data: [DONE]") return;
        const chunk = JSON.parse(part.slice("data: ".length));
        if (chunk.error) throw new Failure(chunk.error.message);
        yield chunk;
      }
    }
  } catch (error) {
    throw error instanceof Failure || error.name === "AbortError" ? error : new Failure(CUT);
  }
}
