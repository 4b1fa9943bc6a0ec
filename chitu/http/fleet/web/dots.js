/* One dot per request: it waits in the lane of its P, flies along the edge with the KV cache, stays in the lane of its D
 * while that decodes, and fades. Owned by Topology.
 *
 * A dot's life is one async function that waits for what the snapshots say. Each step lasts long enough to be seen, so a
 * request that began and ended between two snapshots travels too; the order of events is never invented. */

import { bytes, count, span } from "./format.js";
import { curvePoint, restPoint, widthOf } from "./layout.js";
import { isRunning } from "./stages.js";
import { setAttributes, setText, svgElement } from "./svg.js";

const APPEAR_MS = 200;
const FLIGHT_MS = 900;
const STAY_MS = 900;
const FADE_MS = 400;
const FLIGHT_POINTS = 24;
/** When the page was just opened, or was away: what is longer ago is history, not an event. */
const NEWS_S = 3;
const AWAY_S = 10;
/** More than this nobody can tell apart. */
const MAX_DOTS = 64;

/** How far a request is. */
const IN_PREFILL = 0;
const LEFT_PREFILL = 1;
const ENDED = 2;

export class Dots {
  #layer;
  #layout = null;
  /** Room -> dot. */
  #dots = new Map();
  /** Rooms of the last snapshot: each gets at most one dot. */
  #seen = new Set();
  /** Instance name -> the dots in its lane by slot. */
  #lanes = new Map();
  /** Time of the last snapshot. */
  #lastS = Number.NEGATIVE_INFINITY;
  /** On the way or just landed: one has a label of its own, of several the sum stands between the sides. */
  #moved = new Set();
  #sum;
  #stillness = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(layer) {
    this.#layer = layer;
    this.#sum = new SumLabel(layer.parentElement);
  }

  /** After every layout: dots that rest go to their place in it. */
  relayout(layout) {
    this.#layout = layout;
    this.#sumUp();
    for (const dot of this.#dots.values()) {
      if (dot.lane !== null) this.#rest(dot);
    }
  }

  /** @param requests RequestSnapshots @param {number} nowS the router's clock */
  update(requests, nowS) {
    // What ended before the last snapshot was in it, however late snapshots come.
    const newsS = nowS - this.#lastS < AWAY_S ? Math.min(this.#lastS, nowS - NEWS_S) : nowS - NEWS_S;
    this.#lastS = nowS;
    const rooms = new Set();
    for (const request of requests) {
      rooms.add(request.room);
      const dot = this.#dots.get(request.room);
      if (dot) this.#advance(dot, request);
      else if (!this.#seen.has(request.room)) this.#welcome(request, newsS);
    }
    // Ended so long ago that the router no longer lists it.
    for (const [room, dot] of this.#dots) if (!rooms.has(room)) this.#advance(dot, null);
    this.#seen = rooms;
    this.#sumUp();
  }

  #welcome(request, newsS) {
    const { spots } = this.#layout;
    const isOld = request.ended_at_s !== null && request.ended_at_s < newsS;
    const origin = request.prefill ?? request.decode;
    if (isOld || document.hidden || this.#dots.size >= MAX_DOTS) return;
    if (!spots.has(origin) || !spots.has(request.decode)) return;
    const element = svgElement("g", { class: "dot" });
    element.dataset.dot = request.room;
    element.append(svgElement("circle", { r: 4.5 }), svgElement("text"));
    this.#layer.append(element);
    const dot = { request, element, stage: IN_PREFILL, lane: null, slot: 0, waiters: [] };
    this.#dots.set(request.room, dot);
    this.#advance(dot, request);
    const landedBefore = request.first_token_at_s !== null && request.first_token_at_s < newsS;
    this.#live(dot, landedBefore).finally(() => {
      this.#leaveLane(dot);
      element.remove();
      this.#dots.delete(request.room);
      this.#noteMoved(dot, false);
    });
  }

  #advance(dot, request) {
    if (request !== null) dot.request = request;
    const { state, first_token_at_s: firstTokenAtS } = dot.request;
    if (request === null || !isRunning(dot.request)) dot.stage = ENDED;
    else if (state === "decode" || firstTokenAtS !== null) dot.stage = LEFT_PREFILL;
    label(dot, this.#layout.isNarrow);
    for (const wake of dot.waiters.splice(0)) wake();
  }

  async #live(dot, landedBefore) {
    const { prefill, decode } = dot.request;
    this.#enterLane(dot, landedBefore || prefill === null ? decode : prefill);
    dot.element.dataset.phase = landedBefore ? "decode" : "prefill";
    await play(dot.element, [{ opacity: 0 }, { opacity: 1 }], APPEAR_MS);
    if (!landedBefore) {
      await until(dot, LEFT_PREFILL);
      // Without a first token nothing arrived: it ends where it is.
      if (dot.request.first_token_at_s !== null) {
        if (prefill !== null) {
          this.#noteMoved(dot, true);
          await this.#fly(dot, decode);
          if (dot.stage < ENDED) this.#noteMoved(dot, false);
        }
        dot.element.dataset.phase = "decode";
      }
    }
    await until(dot, ENDED);
    const hasLanded = dot.request.kv_bytes > 0;
    dot.element.dataset.phase = hasLanded ? "landed" : dot.request.state;
    this.#noteMoved(dot, hasLanded);
    await play(dot.element, [{ opacity: 1 }, { opacity: 1 }], STAY_MS);
    await play(dot.element, [{ opacity: 1 }, { opacity: 0 }], FADE_MS);
  }

  async #fly(dot, decode) {
    const from = this.#place(dot);
    this.#enterLane(dot, decode);
    const to = this.#place(dot);
    if (from === null || to === null) return;
    dot.element.dataset.phase = "transfer";
    if (this.#stillness.matches) {
      await play(dot.element, [{ opacity: 1 }, { opacity: 1 }], FLIGHT_MS);
      return;
    }
    const frames = [];
    for (let i = 0; i <= FLIGHT_POINTS; i++) {
      frames.push({ transform: translation(curvePoint(from, to, i / FLIGHT_POINTS)) });
    }
    await play(dot.element, frames, FLIGHT_MS, "ease-in-out");
  }

  #noteMoved(dot, is) {
    if (is) this.#moved.add(dot);
    else this.#moved.delete(dot);
    this.#sumUp();
  }

  #sumUp() {
    const requests = [...this.#moved].map(({ request }) => request);
    this.#layer.classList.toggle("crowded", requests.length > 1);
    this.#sum.show(requests, this.#layout);
  }

  // ------------------------------------------------------------------------------------------------------------ lanes

  #enterLane(dot, name) {
    this.#leaveLane(dot);
    const lane = this.#lanes.get(name) ?? [];
    this.#lanes.set(name, lane);
    const free = lane.indexOf(undefined);
    dot.slot = free === -1 ? lane.length : free;
    lane[dot.slot] = dot;
    dot.lane = name;
    this.#rest(dot);
  }

  #leaveLane(dot) {
    if (dot.lane === null) return;
    const lane = this.#lanes.get(dot.lane);
    lane[dot.slot] = undefined;
    while (lane.length > 0 && lane.at(-1) === undefined) lane.pop();
    dot.lane = null;
  }

  #rest(dot) {
    const place = this.#place(dot);
    if (place !== null) dot.element.style.transform = translation(place);
  }

  #place(dot) {
    return restPoint(this.#layout, dot.lane, dot.slot);
  }
}

/** The sum of several transfers on a ground of its own, between the sides. */
class SumLabel {
  #element;
  #ground;
  #lines;

  constructor(layer) {
    this.#element = layer.appendChild(svgElement("g", { class: "sum" }));
    this.#ground = this.#element.appendChild(svgElement("rect", { rx: 9 }));
    this.#lines = [0, 1].map(() => this.#element.appendChild(svgElement("text", { "text-anchor": "middle" })));
    this.#element.classList.add("gone");
  }

  show(requests, layout) {
    const isShown = requests.length > 1 && layout?.gap;
    this.#element.classList.toggle("gone", !isShown);
    if (!isShown) return;
    const { left, right, y } = layout.gap;
    const pad = layout.isNarrow ? 4 : 9;
    const lines = sumLines(requests, right - left - 2 * pad);
    lines.forEach((line, i) => setText(this.#lines[i], line));
    setText(this.#lines[1], lines[1] ?? "");
    const width = Math.max(...lines.map(widthOf)) + 2 * pad;
    const x = (left + right) / 2;
    setAttributes(this.#ground, { x: x - width / 2, y, width, height: 6 + LINE_HEIGHT * lines.length });
    this.#lines.forEach((line, i) => setAttributes(line, { x, y: y + 14 + LINE_HEIGHT * i }));
  }
}

const LINE_HEIGHT = 15;
/** What several transfers come to, in one line if it fits into `room`, else in two. The router learns the bytes of a
 * request with its end: those that it does not know yet are not in the sum, and the sum says so. */
export function sumLines(requests, room) {
  const known = requests.map(({ kv_bytes: kvBytes }) => kvBytes).filter((kvBytes) => kvBytes > 0);
  const moved = bytes(known.reduce((sum, kvBytes) => sum + kvBytes, 0));
  const long = `${requests.length} transfers`;
  const words = widthOf(long) <= room ? long : `${requests.length} moves`;
  if (known.length === 0) return [words];
  const isPart = known.length < requests.length;
  const line = `${words} · ${isPart ? "over " : ""}${moved}`;
  return widthOf(line) <= room ? [line] : [words, `${isPart ? "≥ " : ""}${moved}`];
}

const translation = ({ x, y }) => `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)`;

/** Bytes and time of the transfer once they are known, the length of the prompt until then. */
function label(dot, isNarrow) {
  const { kv_bytes: kvBytes, prompt_tokens: promptTokens, stages } = dot.request;
  const moved = isNarrow ? bytes(kvBytes) : `${bytes(kvBytes)} · ${span(stages?.transfer_s ?? 0)}`;
  setText(dot.element.lastChild, kvBytes > 0 ? moved : `${count(promptTokens)} tok`);
}

async function until(dot, stage) {
  while (dot.stage < stage) await new Promise((resolve) => dot.waiters.push(resolve));
}

/** Resolves when the animation is over (or was cancelled, because its element is gone). */
async function play(element, frames, duration, easing = "linear") {
  await element.animate(frames, { duration, easing }).finished.catch(() => {});
}
