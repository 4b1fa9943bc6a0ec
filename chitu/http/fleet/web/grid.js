/* The cells of a large cluster: one an instance, its colour how much it has to do, its ring in which state it is. Owned by
 * Topology. An update touches only the cells that look different after it. */

import { SCALES, heatOf, stateOf } from "./heat.js";
import { setAttributes, setData, setText, svgElement } from "./svg.js";

/** Marks by shape over what is not simply up, in a square of 8. */
const MARKS = {
  down: "M-3-3L3 3M3-3L-3 3",
  suspended: "M-2-3V3M2-3V3",
  draining: "M-3-1.5L0 1.5L3-1.5",
  becoming: "M-1.5-3L1.5 0L-1.5 3",
  asleep: "M-2-2H2L-2 2H2",
};
const SWATCH = 10;
const SWATCH_GAP = 2;
const TEXT_ROOM = 66;
const MOST_ROOM = 43;

export class Grid {
  #layer;
  #cells = new Map();
  #scales;

  constructor(layer) {
    this.#layer = layer.appendChild(svgElement("g"));
    this.#scales = layer.appendChild(svgElement("g", { class: "scales", "aria-hidden": "true" }));
  }

  get names() {
    return [...this.#cells.keys()];
  }

  elementOf(name) {
    return this.#cells.get(name)?.element;
  }

  focus(name) {
    for (const { element } of this.#cells.values()) {
      const index = element.dataset.instance === name ? "0" : "-1";
      if (sideOf(element) === sideOf(this.elementOf(name)) && element.getAttribute("tabindex") !== index) {
        setAttributes(element, { tabindex: index });
      }
    }
    this.elementOf(name).focus();
  }

  arrange(layout, instances) {
    const fresh = new Map();
    for (const { name, role } of layout.isGrid ? instances : []) {
      const cell = this.#cells.get(name) ?? newCell(name, role);
      const { x, y, width, height } = layout.spots.get(name);
      setAttributes(cell.element, { transform: `translate(${x} ${y})` });
      setAttributes(cell.square, { width, height, rx: Math.min(4, width / 4) });
      setAttributes(cell.label, { x: width / 2, y: height / 2 + 3.5 });
      setText(cell.label, layout.areNamed ? name : "");
      cell.size = width;
      fresh.set(name, cell);
    }
    for (const { side } of layout.fields ?? []) {
      const ofSide = [...fresh.keys()].filter((name) => layout.spots.get(name).side === side);
      const has = ofSide.some((name) => fresh.get(name).element.getAttribute("tabindex") === "0");
      if (!has && ofSide.length > 0) setAttributes(fresh.get(ofSide[0]).element, { tabindex: "0" });
    }
    this.#layer.replaceChildren(...[...fresh.values()].map(({ element }) => element));
    this.#cells = fresh;
    this.#scales.replaceChildren(...(layout.fields ?? []).map(scaleOf));
  }

  update(instances) {
    for (const instance of instances) {
      const cell = this.#cells.get(instance.name);
      const [heat, state] = [heatOf(instance), stateOf(instance)];
      if (cell === undefined || (cell.heat === heat && cell.state === state)) continue;
      setData(cell.element, { heat, status: state });
      cell.heat = heat;
      if (cell.state === state) continue;
      cell.state = state;
      setAttributes(cell.element, { "aria-label": `${instance.name}, ${state}` });
      cell.mark?.remove();
      cell.mark = null;
      if (state in MARKS) {
        const middle = `translate(${cell.size / 2} ${cell.size / 2}) scale(${Math.min(cell.size / 10, 1.6)})`;
        const turn = instance.role === "prefill" ? "" : " rotate(180)";
        cell.mark = cell.element.appendChild(
          svgElement("path", { class: "mark", d: MARKS[state], transform: middle + (state === "becoming" ? turn : "") }),
        );
      }
    }
  }
}

/** P has the left field, and so has E. */
const sideOf = (element) => element.classList.contains("prefill") || element.classList.contains("encode");

function newCell(name, role) {
  const element = svgElement("g", { class: `cell ${role}`, role: "img", tabindex: "-1" });
  element.dataset.instance = name;
  const square = element.appendChild(svgElement("rect"));
  const label = element.appendChild(svgElement("text", { "text-anchor": "middle" }));
  return { element, square, label, mark: null, heat: null, state: null, size: 0 };
}

/** What the colours of a field mean, at its outer edge: words, the least, five swatches, the most. */
function scaleOf({ side, scale }) {
  const isPrefill = side === "left";
  const { text, least, most } = isPrefill ? SCALES.prefill : SCALES.decode;
  const element = svgElement("g", { class: `scale${isPrefill ? " prefill" : ""}` });
  const write = (line, x, anchor) => {
    setText(element.appendChild(svgElement("text", { x, y: scale.y, "text-anchor": anchor })), line);
  };
  const swatches = 5 * (SWATCH + SWATCH_GAP) - SWATCH_GAP;
  // Right of the swatches is room for `most`, left of them for `least`.
  const x = isPrefill ? scale.x + TEXT_ROOM : scale.x + scale.width - MOST_ROOM - swatches;
  for (let heat = 0; heat < 5; heat++) {
    const at = { x: x + heat * (SWATCH + SWATCH_GAP), y: scale.y - SWATCH + 1, width: SWATCH, height: SWATCH, rx: 2 };
    element.appendChild(svgElement("rect", at)).dataset.heat = heat;
  }
  write(isPrefill ? text : `${text} ${least}`, isPrefill ? scale.x : x - 5, isPrefill ? "start" : "end");
  if (isPrefill) write(least, x - 5, "end");
  write(most, x + swatches + 5, "start");
  return element;
}
