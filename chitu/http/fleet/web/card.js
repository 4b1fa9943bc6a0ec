/* One instance in the topology picture: name, status, tokens per second, queue and pages, as text and as bars.
 * Owned by Topology, which says where it lies and what to show. */

import { UNKNOWN, bytes, count, shortCount } from "./format.js";
import { isIdle, stateOf } from "./heat.js";
import { setAttributes, setData, setText, svgElement } from "./svg.js";

const TICK = 6;
const TICK_GAP = 2;
const BAR_HEIGHT = 5;
/** Of name and state on a narrow card; the frame and the glyph say a longer one. */
const NARROW_LETTERS = 11;
/** Width of a character of the name. */
const NAME_DIGIT = 9.5;
/** Status by shape as well as by colour: disc, half disc, cross. */
const GLYPHS = {
  up: "M0-4a4 4 0 1 1 0 8a4 4 0 1 1 0-8z",
  draining: "M0-4a4 4 0 1 1 0 8z",
  becoming: "M-3-3.5L3 0L-3 3.5z",
  suspended: "M0-4a4 4 0 1 1 0 8a4 4 0 1 1 0-8z",
  asleep: "M-3.5-3.5H3.5L-3.5 3.5H3.5z",
  down: "M-4-4L4 4M4-4L-4 4",
};

export class Card {
  #form = null;
  #queue;
  #pages;

  constructor(instance) {
    this.name = instance.name;
    this.element = svgElement("g", { class: `card ${instance.role}`, tabindex: "0", role: "img" });
    this.element.dataset.instance = instance.name;
    this.frame = this.#add("rect", { class: "frame", rx: 10 });
    this.lane = this.#add("path", { class: "lane" });
    this.glyph = this.#add("path", { class: "glyph" });
    this.label = this.#add("text", { class: "name" });
    this.status = this.#add("text", { class: "status" });
    this.rate = this.#add("text", { class: "rate", "text-anchor": "end" });
    this.rateNumber = this.rate.appendChild(svgElement("tspan"));
    this.rateUnit = this.rate.appendChild(svgElement("tspan", { class: "unit" }));
    this.queueText = this.#add("text", { class: "small" });
    this.ticks = ["running", "moving", "waiting"].map((kind) => this.#add("path", { class: `ticks ${kind}` }));
    this.pagesText = this.#add("text", { class: "small" });
    this.pagesNumber = this.#add("text", { class: "small number", "text-anchor": "end" });
    this.track = this.#add("rect", { class: "track", height: BAR_HEIGHT, rx: BAR_HEIGHT / 2 });
    this.used = this.#add("rect", { class: "used", height: BAR_HEIGHT, rx: BAR_HEIGHT / 2 });
    setText(this.label, instance.name);
  }

  #add(name, attributes) {
    return this.element.appendChild(svgElement(name, attributes));
  }

  /** @param box {x, y, width, height, side} @param form see layout.js */
  place(box, form, isNarrow) {
    this.#form = form;
    this.isNarrow = isNarrow;
    const isLeft = box.side === "left";
    const left = form.pad + (isLeft ? 0 : form.lane);
    const right = box.width - form.pad - (isLeft ? form.lane : 0);
    const middle = (left + right) / 2;
    this.#queue = { left, right: form.split ? middle - 8 : right };
    this.#pages = { left: form.split ? middle : left, right };
    setAttributes(this.element, { transform: `translate(${box.x} ${box.y})` });
    setAttributes(this.frame, { width: box.width, height: box.height });
    const laneX = isLeft ? box.width - form.lane : form.lane;
    setAttributes(this.lane, { d: `M${laneX} 8V${box.height - 8}` });
    setAttributes(this.glyph, { transform: `translate(${left + 4} ${form.nameY - 5})` });
    setAttributes(this.label, { x: left + 15, y: form.nameY });
    setAttributes(this.status, { x: left + 25 + NAME_DIGIT * this.name.length, y: form.nameY });
    setAttributes(this.rate, { x: right, y: form.nameY });
    setAttributes(this.queueText, { x: left, y: form.queueY });
    const hidden = form.pagesY === null;
    this.pagesText.classList.toggle("gone", hidden || isNarrow || Boolean(form.split));
    this.pagesNumber.classList.toggle("gone", hidden);
    setAttributes(this.pagesText, { x: this.#pages.left, y: form.pagesY ?? 0 });
    setAttributes(this.pagesNumber, { x: this.#pages.right, y: form.pagesY ?? 0 });
    setAttributes(this.track, { x: this.#pages.left, y: form.barY, width: this.#pages.right - this.#pages.left });
    setAttributes(this.used, { x: this.#pages.left, y: form.barY });
  }

  /**
   * @param instance InstanceSnapshot
   * @param {number | null} rate tokens per second
   * @param {boolean} isActive
   */
  update(instance, rate, isActive) {
    const { load } = instance;
    const state = stateOf(instance);
    const isEncode = instance.role === "encode";
    setData(this.element, { status: state, active: isActive });
    setAttributes(this.glyph, { d: GLYPHS[state] });
    // A narrow card has no room for both; a rate only matters while the instance is up.
    const word = state === "becoming" ? `→ ${instance.becomes}` : state;
    const wordInRate = this.isNarrow && word !== "up";
    setText(this.status, this.isNarrow ? "" : `${word}${load?.tokens_a_row ? ` ×${load.tokens_a_row}` : ""}`);
    const hasRoom = this.name.length + word.length <= NARROW_LETTERS;
    setText(this.rateNumber, wordInRate ? (hasRoom ? word : "") : shortCount(rate, this.isNarrow ? 3 : 4));
    const unit = isEncode ? [" r/s", " rows/s"] : [" t/s", " tok/s"];
    setText(this.rateUnit, wordInRate ? "" : unit[this.isNarrow ? 0 : 1]);
    this.rate.classList.toggle("word", wordInRate);
    this.rate.classList.toggle("past", isIdle(instance));
    this.#showQueue(load, isEncode);
    this.#showPages(load, isEncode);
    setAttributes(this.element, { "aria-label": describe(instance, rate) });
  }

  #showQueue(load, isEncode) {
    const [waiting, moving, running] = [load?.waiting, load?.transferring, load?.running].map((n) => n ?? 0);
    const isShort = this.isNarrow || Boolean(this.#form.split);
    const moves = isShort ? `wait ${waiting} · run ${running}` : `waiting ${waiting} · moving ${moving} · running ${running}`;
    const words = isEncode ? encodeWords(load, isShort) : moves;
    setText(this.queueText, load === null ? `queue ${UNKNOWN}` : words);
    const { left, right } = this.#queue;
    const total = waiting + moving + running;
    const room = Math.floor((right - left + TICK_GAP) / (TICK + TICK_GAP));
    // One tick a request while they fit; then shares of the width.
    const step = total <= room ? TICK + TICK_GAP : (right - left) / total;
    const width = total <= room ? TICK : step;
    let x = left;
    [running, moving, waiting].forEach((number, i) => {
      let d = "";
      if (total <= room) {
        for (let k = 0; k < number; k++) d += tick(x + k * step, this.#form.ticksY, width);
      } else if (number > 0) {
        d = tick(x, this.#form.ticksY, number * step);
      }
      x += number * step;
      setAttributes(this.ticks[i], { d });
    });
  }

  /** Pages of KV; of an E rows of features, those that images on the way need. */
  #showPages(load, isEncode) {
    const total = (isEncode ? load?.image_rows : load?.pages_total) ?? 0;
    const used = isEncode && load !== null ? (load.image_rows_used ?? 0) : usedPages(load);
    const what = isEncode ? "rows" : "pages";
    const { left, right } = this.#pages;
    setText(this.pagesText, what);
    const [before, slash] = this.isNarrow || this.#form.split ? [`${what} `, "/"] : ["", " / "];
    const number = used === null ? UNKNOWN : `${shortCount(used)}${slash}${shortCount(total)}`;
    setText(this.pagesNumber, before + number);
    const width = used === null || total === 0 ? 0 : ((right - left) * used) / total;
    // A page in use is never invisible.
    setAttributes(this.used, { width: (used ? Math.max(width, 2) : 0).toFixed(1) });
  }
}

function tick(x, y, width) {
  return `M${x.toFixed(1)} ${y}h${width.toFixed(1)}v${BAR_HEIGHT}h${(-width).toFixed(1)}z`;
}

/** Pages of requests. The stream leaves zeros out. */
function usedPages(load) {
  return load === null ? null : (load.pages_used ?? 0);
}

/** Rows that wait to be encoded, and the share of the images that were asked for and known already. */
function encodeWords(load, isShort) {
  const waiting = shortCount(load?.image_load?.waiting_rows ?? 0);
  const known = hitShare(load);
  const hits = known === null ? UNKNOWN : `${Math.round(100 * known)} %`;
  return isShort ? `wait ${waiting} · hit ${hits}` : `${waiting} rows wait · ${hits} of images known`;
}

/** null before any image was asked for. */
function hitShare(load) {
  const hits = load?.image_load?.hits ?? 0;
  const asked = hits + (load?.images ?? 0);
  return asked === 0 ? null : hits / asked;
}

/** Everything known of an instance, as one line. */
export function describe(instance, rate) {
  const { name, role, status, becomes, home, group, host, pid, load, release, revision } = instance;
  const head = `${name} ${role}, ${becomes && status !== "down" ? `becomes ${becomes}` : status}`;
  if (load === null) return `${head}${host ? `, on ${host}` : ""}`;
  const parts = [
    `${head}${home ? `, started as ${home}` : ""}, ${host} pid ${pid}`,
    ...(release ? [`release ${release}`] : []),
    ...(revision ? [`revision ${revision}`] : []),
    ...(group?.length ? [`one group: ${group.join(", ")}`] : []),
    `${shortCount(rate)} tok/s of ${count(load.tokens ?? 0)}`,
    `waiting ${load.waiting ?? 0}, moving ${load.transferring ?? 0}, running ${load.running ?? 0}, retracted ${load.retracted ?? 0}`,
    `pages ${count(usedPages(load))} of ${count(load.pages_total ?? 0)}, quarantined ${load.pages_quarantined ?? 0}`,
    `${count(load.steps ?? 0)} steps`,
  ];
  if (load.tokens_a_row) parts.push(`${load.tokens_a_row} tokens a row, with drafts`);
  if (load.image_rows) {
    parts.push(`image rows ${count(load.image_rows_used ?? 0)} of ${count(load.image_rows)}`);
  }
  if (load.suspended?.length) parts.push(`no writes to ${load.suspended.map((rank) => `D${rank}`).join(", ")}`);
  const image = load.image_load;
  if (image?.row_s) parts.push(`${shortCount(1 / image.row_s)} image rows a second, ${count(image.waiting_rows)} wait`);
  if (role === "encode" && hitShare(load) !== null) parts.push(`${count(image?.hits ?? 0)} images known`);
  if (role === "encode") parts.push(`${count(load.images ?? 0)} images`, `${bytes(load.bytes_moved ?? 0)} sent`);
  else if (role !== "unified") parts.push(`${bytes(load.bytes_moved ?? 0)} KV ${role === "prefill" ? "sent" : "received"}`);
  return parts.join(" · ");
}
