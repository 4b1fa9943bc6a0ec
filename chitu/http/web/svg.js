/* Small helpers to make and change elements. */

const SVG = "http://www.w3.org/2000/svg";

/** A new SVG element with attributes. */
export function svgElement(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  setAttributes(element, attributes);
  return element;
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

/** Sets the text only where it differs, so that nothing is laid out for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
