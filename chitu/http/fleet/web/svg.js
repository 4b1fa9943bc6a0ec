/* Small helpers to make and change elements. */

const SVG = "http://www.w3.org/2000/svg";

/** A new SVG element with attributes. */
export function svgElement(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  setAttributes(element, attributes);
  return element;
}

/** Sets those that differ, so that nothing is laid out for nothing; the next two likewise. */
export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

export function setData(element, data) {
  for (const [name, value] of Object.entries(data)) {
    if (element.dataset[name] !== String(value)) element.dataset[name] = value;
  }
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
