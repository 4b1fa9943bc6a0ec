/* The life of a traced request, drawn: `#trace=ID` in the page's address asks the router for it. */

import { span } from "./format.js";
import { colourOf } from "./stages.js";
import { svgElement } from "./svg.js";

const ROW_HEIGHT = 22;
const LABEL_WIDTH = 230;
const BAR_WIDTH = 420;
const TEXT_X = LABEL_WIDTH + BAR_WIDTH + 12;
const WIDTH = 1100;
/** While records of a request that has just ended are on their way. */
const AGAIN_MS = 700;

export class TimelineView {
  #api;
  #parts;
  /** The newest request that was asked for. */
  #wanted = "";

  /** @param {{section: HTMLElement, title: HTMLElement, drawing: SVGElement, notes: HTMLElement, close: HTMLElement}} parts */
  constructor(api, parts) {
    this.#api = api;
    this.#parts = parts;
    parts.close.addEventListener("click", () => (location.hash = ""));
    addEventListener("hashchange", () => this.show());
    this.show();
  }

  async show() {
    const id = new URLSearchParams(location.hash.slice(1)).get("trace") ?? "";
    const { section, title, drawing, notes } = this.#parts;
    this.#wanted = id;
    section.hidden = id === "";
    if (id === "") return;
    title.textContent = id;
    drawing.replaceChildren();
    notes.replaceChildren();
    await this.#load(id);
    setTimeout(() => this.#wanted === id && this.#load(id), AGAIN_MS);
    section.scrollIntoView({ block: "nearest" });
  }

  async #load(id) {
    try {
      const { timeline } = await (await this.#api.fetch(`trace/${encodeURIComponent(id)}`)).json();
      if (this.#wanted === id) this.#draw(timeline);
    } catch (error) {
      if (this.#wanted === id) this.#say([error.message]);
    }
  }

  #draw(timeline) {
    const { title, drawing } = this.#parts;
    title.textContent = `${timeline.request_id} · ${timeline.title} · ${span(timeline.total_s)}`;
    drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${ROW_HEIGHT * timeline.spans.length}`);
    drawing.replaceChildren(...timeline.spans.map((each, row) => drawRow(each, row, timeline.total_s)));
    const same = timeline.pages.filter((page) => page.is_same).length;
    const said = timeline.pages.length ? [`hashes of KV pages: ${same} of ${timeline.pages.length} are the same on both sides`] : [];
    this.#say([...said, ...timeline.notes]);
  }

  #say(lines) {
    this.#parts.notes.replaceChildren(
      ...lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })),
    );
  }
}

function drawRow(each, row, totalS) {
  const scale = totalS > 0 ? BAR_WIDTH / totalS : 0;
  const x = (atS) => LABEL_WIDTH + Math.max(0, Math.min(BAR_WIDTH, atS * scale));
  const y = row * ROW_HEIGHT;
  const group = svgElement("g", { class: `span ${kindOf(each)}`, "data-where": each.where, "data-what": each.what });
  const [start, end] = [x(each.start_s), x(each.end_s)];
  group.append(
    svgElement("line", { class: "rail", x1: LABEL_WIDTH, x2: LABEL_WIDTH + BAR_WIDTH, y1: y + 11, y2: y + 11 }),
    svgElement("rect", { x: start, y: y + 5, width: Math.max(2, end - start), height: 12, rx: 2 }),
    ...each.marks_s.map((atS) => svgElement("line", { class: "token", x1: x(atS), x2: x(atS), y1: y + 3, y2: y + 19 })),
    words(0, y, each.where, "where"),
    words(56, y, each.what, "what"),
    words(TEXT_X, y, [span(each.end_s - each.start_s), each.text].filter(Boolean).join(" · "), "text"),
  );
  return group;
}

function words(x, y, text, kind) {
  const element = svgElement("text", { x, y: y + 15, class: kind });
  element.textContent = text;
  return element;
}

function kindOf({ where, stage, is_error: isError }) {
  if (isError) return "failed";
  return where.startsWith("router") ? "router" : colourOf(stage);
}
