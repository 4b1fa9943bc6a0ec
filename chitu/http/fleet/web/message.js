/* One message of the conversation as an <article>: its text, how it ended, and the line that says what the cluster did
 * for it. Text from outside only ever becomes a text node. */

import { UNKNOWN, bytes, count, pair, span } from "./format.js";
import { drawStageBar, firstTokenS, isRunning, newStageBar, stagesOf, totalS } from "./stages.js";

/** Longer texts are folded in the log. */
const FOLD_CHARS = 600;
const FOLD_LINES = 12;
const HEAD_CHARS = 170;
const TAIL_CHARS = 90;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function article(role, title) {
  const made = element("article");
  made.dataset.role = role;
  made.append(element("h3", "who", title));
  return made;
}

/** What the user sent. A long prompt shows its beginning and its end, where the question is.
 * @param {HTMLElement[]} pictures of its images */
export function userMessage(text, title, pictures = []) {
  const made = article("user", title);
  if (pictures.length > 0) {
    const shown = element("div", "pictures");
    shown.append(...pictures);
    made.append(shown);
  }
  const full = element("div", "text", text);
  const isLong = text.length > FOLD_CHARS || text.split("\n").length > FOLD_LINES;
  if (!isLong) {
    made.append(full);
    return made;
  }
  const details = element("details", "fold");
  const summary = element("summary");
  const flat = text.replace(/\s+/g, " ");
  // Cut between words.
  const head = flat.slice(0, HEAD_CHARS).replace(/ \S*$/, "");
  const tail = flat.slice(-TAIL_CHARS).replace(/^\S* /, "");
  summary.append(
    element("span", "preview", `${head} … ${tail}`),
    element("span", "more", `all ${count(text.length)} characters`),
  );
  details.append(summary, full);
  made.append(details);
  return made;
}

/** An answer that streams in. */
export class AssistantMessage {
  #text = document.createTextNode("");
  #trace = null;
  #isTraced = false;
  requestId = "";

  constructor(title) {
    this.element = article("assistant", title);
    this.element.dataset.streaming = "true";
    // Read out once it is complete, not token by token.
    this.element.setAttribute("aria-busy", "true");
    const text = element("div", "text");
    text.append(this.#text);
    this.element.append(text);
  }

  get text() {
    return this.#text.data;
  }

  append(text) {
    this.#text.appendData(text);
  }

  /** The server took the request: its trace can be looked for in the snapshots. */
  accept(requestId) {
    this.requestId = requestId;
    this.#trace = element("p", "trace", "waiting for the cluster's report");
    this.element.append(this.#trace);
  }

  finish() {
    delete this.element.dataset.streaming;
    this.element.removeAttribute("aria-busy");
  }

  stop() {
    this.finish();
    this.element.dataset.stopped = "true";
    this.note("stopped");
  }

  /** @param {ApiError} error @param {() => void} retry */
  fail(error, retry) {
    this.finish();
    this.element.dataset.error = error.code;
    const note = this.note(`${error.code}: ${error.message}`);
    note.classList.add("failure");
    note.setAttribute("role", "alert");
    const button = element("button", "quiet", "Retry");
    button.type = "button";
    button.addEventListener("click", retry);
    note.append(" ", button);
  }

  /** A tick or a cross: the expected value is in the answer, or it is not. */
  judge(value) {
    const isCorrect = containsValue(this.text, value);
    this.element.dataset.correct = String(isCorrect);
    const verdict = element("p", "verdict");
    verdict.append(element("b", "", isCorrect ? "✓" : "✗"), isCorrect ? ` ${value} is right` : ` expected ${value}`);
    this.element.querySelector(".text").after(verdict);
  }

  /** A line of ours below the text. */
  note(text) {
    const note = element("p", "note", text);
    this.element.querySelector(".text").after(note);
    return note;
  }

  /** Shows what the snapshot says of this request; once it has ended, for good. */
  trace(snapshot) {
    if (this.#trace === null || this.#isTraced) return;
    const request = snapshot.requests.findLast(({ request_id: id }) => id === this.requestId);
    if (request === undefined) return;
    this.#isTraced = !isRunning(request);
    this.#trace.replaceChildren(...traceOf(request, snapshot.time_s));
  }
}

/** Whole words only: 4827 is not in 14827. */
export function containsValue(text, value) {
  const escaped = value.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return new RegExp(`(?<!\\w)${escaped}(?!\\w)`).test(text);
}

function cachedText({ cached_tokens: cached }) {
  return cached ? `, ${count(cached)} cached` : "";
}

function traceOf(request, nowS) {
  const { stages } = request;
  const hasTransfer = request.prefill !== null;
  const item = (name, value) => {
    const made = element("span", "item");
    made.append(element("span", "key", name), " ", element("span", "value", value));
    return made;
  };
  const items = [
    element("span", "pair", pair(request)),
    item("prompt", `${count(request.prompt_tokens)} tokens${cachedText(request)}`),
    item("output", `${count(request.output_tokens)} tokens`),
    ...(hasTransfer ? [item("admission", span(stages?.admission_s))] : []),
    item("queue", span(stages?.queue_s)),
    item("compute", span(stages?.compute_s)),
  ];
  if (hasTransfer) {
    items.push(item("KV", request.kv_bytes > 0 ? bytes(request.kv_bytes) : UNKNOWN));
    items.push(item("transfer", span(stages?.transfer_s)));
  }
  items.push(item("first token", span(firstTokenS(request))));
  items.push(item("total", isRunning(request) ? UNKNOWN : span(totalS(request))));
  return [drawStageBar(newStageBar(), stagesOf(request, nowS)), ...items];
}
