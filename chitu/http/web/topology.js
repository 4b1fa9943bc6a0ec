/* The live picture: P on the left, D on the right, an edge for each pair, requests as dots. Fed by main.js with every
 * snapshot; owns everything inside `#topology`. */

import { Card, describe } from "./card.js";
import { Dots } from "./dots.js";
import { curvePath, layoutOf } from "./layout.js";
import { isRunning } from "./stages.js";
import { setAttributes, svgElement } from "./svg.js";

/** An instance or a pair still counts as active for so long after its last request. */
const AFTERGLOW_S = 1.5;

export class Topology {
  #svg;
  #rates;
  #onDescribe;
  #layers;
  #dots;
  #captions = [];
  #cards = new Map();
  /** "P0-D1" -> path. */
  #edges = new Map();
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
      ["captions", "edges", "cards", "dots"].map((name) => [name, svg.appendChild(svgElement("g", { class: name }))]),
    );
    this.#dots = new Dots(this.#layers.dots);
    const frame = svg.parentElement;
    for (const [event, isNear] of [["pointerover", true], ["focusin", true], ["pointerout", false], ["focusout", false]]) {
      // Not on the SVG: an SVG element with listeners for the focus becomes a stop of the Tab key.
      frame.addEventListener(event, ({ target }) => this.#pointAt(isNear ? target.closest("[data-instance]") : null));
    }
    new ResizeObserver(() => this.#snapshot && this.update(this.#snapshot)).observe(frame);
  }

  update(snapshot) {
    this.#snapshot = snapshot;
    this.#arrange();
    // Nothing is drawn while the picture has no width.
    if (this.#signature === "") return;
    const nowS = snapshot.time_s;
    const active = activeNames(snapshot.requests, nowS);
    for (const instance of snapshot.instances) {
      this.#cards.get(instance.name).update(instance, this.#rates.of(instance.name), active.has(instance.name));
    }
    for (const [pair, { dataset }] of this.#edges) {
      const isActive = String(active.has(pair));
      if (dataset.active !== isActive) dataset.active = isActive;
    }
    this.#dots.update(snapshot.requests, nowS);
    this.#describe();
  }

  /** Layout and elements, where the width or the set of instances changed. */
  #arrange() {
    const { instances, transport } = this.#snapshot;
    const width = this.#svg.parentElement.clientWidth;
    const signature = `${width} ${transport} ${instances.map(({ name }) => name).join(" ")}`;
    if (signature === this.#signature || width === 0) return;
    this.#signature = signature;
    const layout = layoutOf(width, instances);
    setAttributes(this.#svg, { width, height: layout.height, viewBox: `0 0 ${width} ${layout.height}` });
    this.#svg.classList.toggle("many-pairs", layout.manyPairs);
    this.#svg.classList.toggle("narrow", layout.isNarrow);
    this.#drawCaptions(layout, transport);
    this.#drawCards(layout, instances);
    this.#drawEdges(layout);
    this.#dots.relayout(layout);
  }

  #drawCaptions(layout, transport) {
    const captions = [...layout.captions];
    if (layout.pairs.size > 0) {
      captions.push({ text: layout.isNarrow ? "KV" : `KV cache · ${transport}`, x: layout.width / 2, anchor: "middle" });
    }
    this.#layers.captions.replaceChildren(
      ...captions.map(({ text, x, anchor }) => {
        const element = svgElement("text", { class: "caption", x, y: 14, "text-anchor": anchor });
        element.textContent = text;
        return element;
      }),
    );
  }

  #drawCards(layout, instances) {
    const fresh = new Map();
    for (const instance of instances) {
      const card = this.#cards.get(instance.name) ?? new Card(instance);
      card.place(layout.cards.get(instance.name), layout.form, layout.isNarrow);
      fresh.set(instance.name, card);
    }
    if ([...fresh.keys()].join() !== [...this.#cards.keys()].join()) {
      this.#layers.cards.replaceChildren(...[...fresh.values()].map((card) => card.element));
    }
    this.#cards = fresh;
  }

  #drawEdges(layout) {
    this.#edges = new Map(
      [...layout.pairs].map(([pair, [from, to]]) => {
        const path = svgElement("path", { class: "edge", d: curvePath(from, to) });
        path.dataset.pair = pair;
        path.dataset.active = "false";
        return [pair, path];
      }),
    );
    this.#layers.edges.replaceChildren(...this.#edges.values());
  }

  /** Emphasises the edge of one pair ("P0-D1"); null ends that. */
  pointAtPair(name) {
    for (const [pair, path] of this.#edges) path.classList.toggle("near", pair === name);
  }

  #pointAt(element) {
    this.#near = element?.dataset.instance ?? null;
    for (const [pair, path] of this.#edges) {
      path.classList.toggle("near", this.#near !== null && pair.split("-").includes(this.#near));
    }
    this.#describe();
  }

  #describe() {
    const instance = this.#snapshot?.instances.find(({ name }) => name === this.#near);
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
