/* The live picture: P on the left, D on the right, wires between pairs, requests as dots. A small cluster has a card for
 * each instance, a large one a field of cells and cards for the few that matter. Fed by main.js with every snapshot; owns
 * everything inside `#topology`. */

import { Card, describe } from "./card.js";
import { Dots } from "./dots.js";
import { Grid } from "./grid.js";
import { FEATURED, curvePath, layoutOf, restPoint, widthOf, wiresOf } from "./layout.js";
import { Featured, troubleText } from "./heat.js";
import { isRunning } from "./stages.js";
import { setAttributes, setData, setText, svgElement } from "./svg.js";

/** An instance or a pair still counts as active for so long after its last request. */
const AFTERGLOW_S = 1.5;
/** A wire without work fades for so long before it goes. */
const FADE_S = 0.5;
/** An instance that said what it becomes is that within this. */
const FLIP_S = 15;
const FLIP_MS = 900;

export class Topology {
  #svg;
  #rates;
  #onDescribe;
  #layers;
  #dots;
  #grid;
  #layout = null;
  #captions = new Map();
  #cards = new Map();
  #featured = { left: new Featured(), right: new Featured() };
  /** "P0-D1" -> {path, idleSinceS}. */
  #wires = new Map();
  /** Name after a change of role -> {from, untilS}: where it was last seen under its old one. */
  #flips = new Map();
  #signature = "";
  #snapshot = null;
  #near = null;

  /**
   * @param {SVGElement} svg
   * @param {TokenRates} rates
   * @param {(text: string | null) => void} onDescribe the instance that is pointed at, as one line
   */
  constructor(svg, rates, onDescribe) {
    this.#svg = svg;
    this.#rates = rates;
    this.#onDescribe = onDescribe;
    this.#layers = Object.fromEntries(
      ["captions", "edges", "cards", "cells", "dots"].map((name) => [name, svg.appendChild(svgElement("g", { class: name }))]),
    );
    this.#dots = new Dots(this.#layers.dots);
    this.#grid = new Grid(this.#layers.cells);
    const frame = svg.parentElement;
    for (const [event, isNear] of [["pointerover", true], ["focusin", true], ["pointerout", false], ["focusout", false]]) {
      // Not on the SVG: an SVG element with listeners for the focus becomes a stop of the Tab key.
      frame.addEventListener(event, ({ target }) => this.#pointAt(isNear ? target.closest("[data-instance]") : null));
    }
    frame.addEventListener("keydown", (event) => this.#walk(event));
    new ResizeObserver(() => this.#snapshot && this.update(this.#snapshot)).observe(frame);
  }

  update(snapshot) {
    this.#snapshot = snapshot;
    this.#noteFlips(snapshot);
    this.#arrange();
    // Nothing is drawn while the picture has no width.
    if (this.#layout === null) return;
    const { instances, requests, time_s: nowS } = this.#snapshot;
    const active = activeNames(requests, nowS);
    this.#placeCards();
    for (const instance of instances) {
      this.#cards.get(instance.name)?.update(instance, this.#rates.of(instance.name), active.has(instance.name));
    }
    if (this.#layout.isGrid) this.#grid.update(instances);
    this.#drawWires(active, nowS);
    this.#showTrouble();
    this.#dots.update(requests, nowS);
    this.#describe();
  }

  /** Layout and elements, where the width or the set of instances changed. */
  #arrange() {
    const { instances, transport } = this.#snapshot;
    const width = this.#svg.parentElement.clientWidth;
    const signature = `${width} ${transport} ${instances.map(({ name }) => name).join(" ")}`;
    if (signature === this.#signature || width === 0) return;
    this.#signature = signature;
    const layout = (this.#layout = layoutOf(width, instances));
    setAttributes(this.#svg, { width, height: layout.height, viewBox: `0 0 ${width} ${layout.height}` });
    for (const [name, is] of [["many-pairs", layout.manyPairs], ["narrow", layout.isNarrow], ["grid", layout.isGrid]]) {
      this.#svg.classList.toggle(name, is);
    }
    this.#drawCaptions(layout, transport);
    this.#grid.arrange(layout, instances);
    this.#layers.edges.replaceChildren();
    this.#wires.clear();
    this.#placeCards(true);
    this.#dots.relayout(layout);
    this.#playFlips();
  }

  #drawCaptions(layout, transport) {
    this.#captions = new Map(
      layout.captions.map(({ text, side, x, anchor }) => {
        const element = svgElement("text", { class: "caption", x, y: 14, "text-anchor": anchor });
        const number = this.#ofSide(side).length;
        element.append(svgElement("tspan"), svgElement("tspan", { class: "trouble" }));
        setText(element.firstChild, layout.isGrid && !layout.isNarrow ? `${text} · ${number}` : text);
        return [side, element];
      }),
    );
    const middle = svgElement("text", { class: "caption", x: layout.width / 2, y: 14, "text-anchor": "middle" });
    setText(middle, layout.gap === null ? "" : layout.isNarrow ? "KV" : `KV cache · ${transport}`);
    this.#layers.captions.replaceChildren(...this.#captions.values(), middle);
  }

  /** Over a field of cells: how many are not simply up. */
  #showTrouble() {
    if (!this.#layout.isGrid) return;
    for (const [side, element] of this.#captions) {
      const room = this.#layout.captionRoom - widthOf(element.firstChild.textContent);
      const text = troubleText(this.#ofSide(side), Math.floor(room / widthOf(" ")) - 3);
      setText(element.lastChild, text === "" ? "" : ` · ${text}`);
    }
  }

  #ofSide(side) {
    return this.#snapshot.instances.filter(({ name }) => this.#layout.spots.get(name).side === side);
  }

  // ------------------------------------------------------------------------------------------------------------ cards

  /** Cards at their places: of all, or of those that deserve one. */
  #placeCards(isForced = false) {
    const { instances, time_s: nowS } = this.#snapshot;
    const { spots, form, isNarrow, isGrid, places } = this.#layout;
    let boxes = spots;
    if (isGrid) {
      boxes = new Map();
      const count = isNarrow ? FEATURED.narrow : FEATURED.wide;
      for (const [side, free] of Object.entries(places)) {
        this.#featured[side].choose(this.#ofSide(side), count, nowS).forEach((name, i) => free[i] && boxes.set(name, free[i]));
      }
    }
    const key = [...boxes.keys()].join();
    if (!isForced && key === [...this.#cards.keys()].join()) return;
    const byName = new Map(instances.map((instance) => [instance.name, instance]));
    const fresh = new Map();
    for (const [name, box] of boxes) {
      if (!byName.has(name)) continue;
      const card = this.#cards.get(name) ?? new Card(byName.get(name));
      card.place(box, form, isNarrow);
      fresh.set(name, card);
    }
    this.#cards = fresh;
    this.#layers.cards.replaceChildren(...[...fresh.values()].map((card) => card.element));
  }

  // ------------------------------------------------------------------------------------------------------------ wires

  #drawWires(active, nowS) {
    const wanted = wiresOf(this.#layout, this.#snapshot.instances, active, this.#near);
    for (const pair of wanted) {
      if (this.#wires.has(pair)) continue;
      const [from, to] = pair.split("-").map((name) => restPoint(this.#layout, name, 0));
      const path = this.#layers.edges.appendChild(svgElement("path", { class: "edge", d: curvePath(from, to) }));
      path.dataset.pair = pair;
      this.#wires.set(pair, { path, idleSinceS: nowS });
    }
    for (const [pair, wire] of this.#wires) {
      const isActive = active.has(pair);
      if (isActive || wanted.has(pair)) wire.idleSinceS = nowS;
      setData(wire.path, { active: isActive });
      wire.path.classList.toggle("near", this.#near !== null && pair.split("-").includes(this.#near));
      if (wanted.has(pair) || Math.abs(nowS - wire.idleSinceS) < FADE_S) continue;
      wire.path.remove();
      this.#wires.delete(pair);
    }
  }

  /** Emphasises the wire of one pair ("P0-D1"); null ends that. */
  pointAtPair(name) {
    for (const [pair, { path }] of this.#wires) path.classList.toggle("near", pair === name);
  }

  // ------------------------------------------------------------------------------------------------------------ flips

  /** Remembers where an instance lies that says what it becomes. */
  #noteFlips({ instances, time_s: nowS }) {
    for (const { name, becomes } of instances) {
      const from = becomes ? this.#layout?.spots.get(name) : undefined;
      if (from !== undefined) this.#flips.set(becomes, { from, untilS: nowS + FLIP_S });
    }
    for (const [after, { untilS }] of this.#flips) if (untilS < nowS) this.#flips.delete(after);
  }

  /** Who came back under another role moves from where it was to where it is. */
  #playFlips() {
    for (const [name, { from }] of this.#flips) {
      const to = this.#layout.spots.get(name);
      const element = this.#layout.isGrid ? this.#grid.elementOf(name) : this.#cards.get(name)?.element;
      if (to === undefined || element === undefined) continue;
      this.#flips.delete(name);
      element.dataset.flipping = "true";
      element.parentElement.append(element);
      const steps = [from, to].map(({ x, y }) => ({ transform: `translate(${x}px, ${y}px)` }));
      const { matches: isStill } = matchMedia("(prefers-reduced-motion: reduce)");
      const move = element.animate(isStill ? steps.slice(1) : steps, { duration: FLIP_MS, easing: "ease-in-out" });
      move.finished.catch(() => {}).finally(() => delete element.dataset.flipping);
    }
  }

  // --------------------------------------------------------------------------------------------------------- pointing

  #pointAt(element) {
    this.#near = element?.dataset.instance ?? null;
    if (this.#snapshot === null || this.#layout === null) return;
    this.#drawWires(activeNames(this.#snapshot.requests, this.#snapshot.time_s), this.#snapshot.time_s);
    for (const other of this.#svg.querySelectorAll(".cell.near")) other.classList.remove("near");
    if (this.#near !== null) this.#grid.elementOf(this.#near)?.classList.add("near");
    this.#describe();
  }

  /** A field of cells is one stop of the Tab key; the arrows walk in it. */
  #walk(event) {
    const cell = event.target.closest(".cell");
    const field = this.#layout?.fields?.find(({ side }) => side === this.#layout.spots.get(cell?.dataset.instance)?.side);
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -field?.columns, ArrowDown: field?.columns }[event.key];
    if (!field || step === undefined) return;
    event.preventDefault();
    const names = this.#grid.names.filter((name) => this.#layout.spots.get(name).side === field.side);
    const next = names[names.indexOf(cell.dataset.instance) + step];
    if (next !== undefined) this.#grid.focus(next);
  }

  #describe() {
    const instance = this.#near === null ? undefined : this.#snapshot?.instances.find(({ name }) => name === this.#near);
    this.#onDescribe(instance ? describe(instance, this.#rates.of(instance.name)) : null);
  }
}

/** Names of the instances and of the pairs ("P0-D1") with a request that runs or ended just now. */
function activeNames(requests, nowS) {
  const active = new Set();
  for (const request of requests) {
    if (!isRunning(request) && nowS - request.ended_at_s > AFTERGLOW_S) continue;
    active.add(request.decode);
    if (request.prefill === null) continue;
    active.add(request.prefill);
    active.add(`${request.prefill}-${request.decode}`);
  }
  return active;
}
