/* Several different examples at once: the quickest way to see many pairs at work, and whether all answers are right.
 * One block in the conversation's log; Chat starts it, stops it and feeds it with snapshots. */

import { pair, span } from "./format.js";
import { containsValue } from "./message.js";
import { isRunning, totalS } from "./stages.js";

/** A browser opens six connections to a server of HTTP/1.1, and the event stream has one of them. */
const SIZE = 5;

export class Burst {
  #api;
  #cells = [];

  constructor(api) {
    this.#api = api;
    this.element = document.createElement("section");
    this.element.className = "burst";
    this.title = this.element.appendChild(document.createElement("h3"));
    this.title.className = "who";
    this.title.textContent = `${SIZE} examples at once`;
    const list = this.element.appendChild(document.createElement("ol"));
    for (let i = 0; i < SIZE; i++) {
      const element = list.appendChild(document.createElement("li"));
      element.dataset.state = "running";
      const [verdict, answer, where] = ["verdict", "answer", "where"].map((className) => {
        const part = element.appendChild(document.createElement("span"));
        part.className = className;
        return part;
      });
      verdict.textContent = "…";
      this.#cells.push({ element, verdict, answer, where, requestId: "", isTraced: false });
    }
  }

  /** Ends when all of them have ended, however that was. */
  async run(settings, tokens, signal) {
    const outcomes = await Promise.all(this.#cells.map((cell) => this.#runOne(cell, settings, tokens, signal)));
    const right = outcomes.filter((outcome) => outcome === "right").length;
    this.element.dataset.right = String(right);
    this.title.textContent = `${SIZE} examples at once: ${right} of ${SIZE} right`;
  }

  async #runOne(cell, settings, tokens, signal) {
    const outcome = await this.#ask(cell, settings, tokens, signal);
    cell.element.dataset.state = outcome;
    cell.verdict.textContent = outcome === "right" ? "✓" : outcome === "stopped" ? "–" : "✗";
    return outcome;
  }

  async #ask(cell, settings, tokens, signal) {
    try {
      const { prompt, value } = await this.#api.example(tokens);
      let text = "";
      const body = { ...settings, messages: [{ role: "user", content: prompt }] };
      for await (const piece of this.#api.generate("chat", body, signal)) {
        if (piece.requestId !== undefined) cell.requestId = piece.requestId;
        if (piece.text !== undefined) cell.answer.textContent = text += piece.text;
      }
      const isRight = containsValue(text, value);
      if (!isRight) cell.element.title = `expected ${value}`;
      return isRight ? "right" : "wrong";
    } catch (error) {
      if (signal.aborted) return "stopped";
      cell.answer.textContent = `${error.code ?? "page"}: ${error.message}`;
      return "failed";
    }
  }

  trace(snapshot) {
    for (const cell of this.#cells) {
      if (cell.isTraced || cell.requestId === "") continue;
      const request = snapshot.requests.findLast(({ request_id: id }) => id === cell.requestId);
      if (request === undefined) continue;
      cell.isTraced = !isRunning(request);
      const total = cell.isTraced ? ` · ${span(totalS(request))}` : "";
      cell.where.textContent = `${pair(request)}${total}`;
    }
  }
}
