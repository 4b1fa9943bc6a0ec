/* The router's HTTP interface: one object with the API key, requests as promises and streams as async generators.
 * Every failure is an ApiError with a code. Paths are relative, so the page also works behind a prefix. */

import { readEvents } from "./sse.js";

export class ApiError extends Error {
  /** @param {string} code a code of the server, or `network`, `stream_broken`, `http_<status>` */
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

export class Api {
  /** Kept for this tab only. */
  #key = "";

  set key(value) {
    this.#key = value.trim();
  }

  get key() {
    return this.#key;
  }

  /** A response whose status is good. ApiError otherwise; AbortError when `signal` says so. */
  async fetch(path, { body, signal } = {}) {
    const headers = {};
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        cache: "no-store",
        signal,
      });
    } catch (error) {
      throw signal?.aborted ? error : new ApiError("network", "the router cannot be reached");
    }
    if (!response.ok) throw await failureOf(response);
    return response;
  }

  /** @returns {Promise<{prompt: string, answer: string, value: string}>} */
  async example(tokens) {
    return (await this.fetch(`demo/example?tokens=${tokens}`)).json();
  }

  async modelName() {
    const models = await (await this.fetch("v1/models")).json();
    return models.data[0].id;
  }

  /**
   * A streamed generation. Yields `{requestId}` first, then `{text}` per piece, `{finish}` and `{usage}`.
   * @param {"chat" | "completion"} mode
   * @param {object} body the request without `stream`
   */
  async *generate(mode, body, signal) {
    const path = mode === "chat" ? "v1/chat/completions" : "v1/completions";
    const streaming = { ...body, stream: true, stream_options: { include_usage: true } };
    if (mode === "chat") streaming.separate_reasoning = false; // it is shown as the model writes it
    const response = await this.fetch(path, { body: streaming, signal });
    yield { requestId: response.headers.get("X-Request-Id") ?? "" };
    let isComplete = false;
    try {
      for await (const data of readEvents(response.body)) {
        if (data === "[DONE]") isComplete = true;
        if (isComplete) continue;
        const event = parsed(data);
        if (event.error) throw errorOf(event.error, "internal");
        if (event.usage) yield { usage: event.usage };
        const choice = event.choices?.[0];
        const text = choice?.delta?.content ?? choice?.text;
        if (text) yield { text };
        if (choice?.finish_reason) yield { finish: choice.finish_reason };
      }
    } catch (error) {
      if (signal?.aborted || error instanceof ApiError) throw error;
      throw new ApiError("network", "the connection to the router broke");
    }
    if (!isComplete) throw new ApiError("stream_broken", "the stream ended before the answer did");
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("bad_event", "the router sent an event that is no JSON");
  }
}

function errorOf(error, fallbackCode) {
  return new ApiError(String(error.code ?? fallbackCode), String(error.message ?? "no message"));
}

async function failureOf(response) {
  const fallback = `http_${response.status}`;
  try {
    const { error } = await response.json();
    return errorOf(error, fallback);
  } catch {
    return new ApiError(fallback, `the router answered with status ${response.status}`);
  }
}
