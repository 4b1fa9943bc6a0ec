/* The table of the latest requests, newest first. Fed by main.js; rows are kept and changed in place. */

import { UNKNOWN, bytes, count, pair, shortId, span } from "./format.js";
import { byColour, drawStageBar, isRunning, newStageBar, stagesOf, stagesText, totalS } from "./stages.js";
import { setAttributes, setData, setText } from "./svg.js";

const ROWS = 12;
const MARKS = { prefill: "○", decode: "◐", finished: "●", retried: "↻", failed: "✕", cancelled: "–" };

export class RequestTable {
  #body;
  #empty;
  /** Room -> row. */
  #rows = new Map();

  /**
   * @param {HTMLElement} empty shown while there is none
   * @param {(pair: string | null) => void} onPoint the pair ("P0-D1") of the row that is pointed at
   */
  constructor(body, empty, onPoint) {
    this.#body = body;
    this.#empty = empty;
    body.addEventListener("pointerover", ({ target }) => onPoint(target.closest("tr")?.dataset.edge ?? null));
    body.addEventListener("pointerleave", () => onPoint(null));
  }

  update(requests, nowS) {
    const latest = [...requests].sort((a, b) => b.created_at_s - a.created_at_s).slice(0, ROWS);
    const rows = new Map(latest.map((request) => [request.room, this.#rows.get(request.room) ?? new Row(request)]));
    const order = [...rows.keys()].join();
    if (order !== [...this.#rows.keys()].join()) {
      this.#body.replaceChildren(...[...rows.values()].map((row) => row.element));
    }
    this.#rows = rows;
    if (this.#empty.hidden !== latest.length > 0) this.#empty.hidden = latest.length > 0;
    for (const request of latest) rows.get(request.room).update(request, nowS);
  }
}

/** "drafts 8/10 prediction, 3/9 text": accepted of drafted tokens. */
function draftsText(drafts) {
  return `drafts ${drafts.map(([source, drafted, accepted]) => `${accepted}/${drafted} ${source}`).join(", ")}`;
}

class Row {
  #cells = {};
  #isFinal = false;

  constructor(request) {
    this.element = document.createElement("tr");
    this.element.dataset.room = request.room;
    this.element.dataset.requestId = request.request_id;
    if (request.prefill !== null) this.element.dataset.edge = `${request.prefill}-${request.decode}`;
    for (const name of ["request", "pair", "prompt", "output", "kv", "time"]) {
      const cell = document.createElement("td");
      cell.className = ["prompt", "output", "kv"].includes(name) ? `${name} num` : name;
      this.#cells[name] = this.element.appendChild(cell);
    }
    this.mark = this.#span(this.#cells.request, "mark");
    this.id = this.#cells.request.appendChild(document.createElement("a"));
    this.id.className = "id";
    this.id.href = `#trace=${encodeURIComponent(request.request_id)}`;
    this.id.textContent = shortId(request.request_id);
    this.id.title = request.request_id;
    this.bar = this.#cells.time.appendChild(newStageBar());
    this.total = this.#span(this.#cells.time, "total");
    this.parts = this.#span(this.#cells.time, "parts");
  }

  #span(parent, className) {
    const span = document.createElement("span");
    span.className = className;
    return parent.appendChild(span);
  }

  update(request, nowS) {
    if (this.#isFinal) return;
    this.#isFinal = !isRunning(request);
    const { state } = request;
    setData(this.element, { state });
    setText(this.mark, MARKS[state]);
    setAttributes(this.mark, { title: state });
    const { pair: pairCell, prompt, output, kv } = this.#cells;
    setText(pairCell, pair(request));
    setText(prompt, count(request.prompt_tokens));
    setText(output, count(request.output_tokens));
    if (request.drafts) setAttributes(output, { title: draftsText(request.drafts) });
    setText(kv, request.kv_bytes > 0 ? bytes(request.kv_bytes) : UNKNOWN);
    const parts = stagesOf(request, nowS);
    drawStageBar(this.bar, parts);
    setText(this.total, span(totalS(request, nowS)));
    this.#showParts(request, parts);
  }

  #showParts(request, parts) {
    const text = stagesText(parts);
    if (this.#cells.time.title === text) return;
    this.#cells.time.title = text;
    this.parts.setAttribute("aria-label", `${request.state}: ${text}`);
    const shown = byColour(parts).map(({ name, seconds }) => {
      const part = document.createElement("span");
      part.className = `part ${name}`;
      // The style sheet says the word where there is room for it.
      part.dataset.word = name === "prefill" ? "in prefill" : name;
      part.textContent = span(seconds);
      return part;
    });
    if (request.state === "failed" || request.state === "retried" || request.state === "cancelled") {
      const word = document.createElement("b");
      word.className = "outcome";
      word.textContent = request.state === "retried" ? `${request.error}, tried again` : request.error || request.state;
      shown.push(word);
    }
    this.parts.replaceChildren(...shown);
  }
}
