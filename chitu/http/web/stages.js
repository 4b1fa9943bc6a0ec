/* Where a request's time went: its stages as numbers, as a small stacked bar, as text. */

import { span } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

export const isRunning = (request) => request.state === "prefill" || request.state === "decode";

/**
 * The spans of a request in the order in which they pass, in seconds: what the instances measured where they said it,
 * else what the router saw (up to the first token, then to the end or to `nowS` on the router's clock).
 * The wire leaves zeros out, so a missing field is 0.
 */
export function stagesOf(request, nowS) {
  const { stages } = request;
  if (stages !== null) {
    const prefill = stages.prefill ?? {};
    const queueS = prefill.queue_s ?? 0;
    const computeS = prefill.compute_s ?? 0;
    const transferS = request.prefill === null ? 0 : prefill.transfer_s ?? 0;
    const restS = Math.max(0, (stages.total_s ?? 0) - queueS - computeS - transferS);
    const parts = [
      { name: "queue", seconds: queueS },
      { name: "prefill", seconds: computeS },
      { name: "transfer", seconds: transferS },
      { name: "decode", seconds: restS },
    ];
    return request.prefill === null ? parts.filter(({ name }) => name !== "transfer") : parts;
  }
  const endS = request.ended_at_s ?? Math.max(nowS, request.created_at_s);
  const firstS = request.first_token_at_s;
  if (firstS === null) return [{ name: "waiting", seconds: endS - request.created_at_s }];
  return [
    { name: "first", seconds: firstS - request.created_at_s },
    { name: "decode", seconds: Math.max(0, endS - firstS) },
  ];
}

/** What the router saw has other names than what the instances measured. */
export const WORDS = { first: "to first token", waiting: "since the start" };

/** "queue 1 ms · prefill 210 ms · transfer 14 ms · decode 640 ms" */
export function stagesText(parts) {
  return parts.map(({ name, seconds }) => `${WORDS[name] ?? name} ${span(seconds)}`).join(" · ");
}

/** Time to first token as the router saw it, in seconds; null before it. */
export function firstTokenS(request) {
  return request.first_token_at_s === null ? null : request.first_token_at_s - request.created_at_s;
}

/** An SVG whose segments have the shares of `parts`; call it again with the same element to redraw. */
export function drawStageBar(svg, parts) {
  const total = parts.reduce((sum, { seconds }) => sum + seconds, 0);
  svg.setAttribute("viewBox", "0 0 100 1");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("stage-bar");
  let x = 0;
  const segments = total > 0 ? parts : [];
  svg.replaceChildren(
    ...segments.map(({ name, seconds }) => {
      const rect = document.createElementNS(SVG, "rect");
      const width = (100 * seconds) / total;
      rect.setAttribute("class", `stage ${name}`);
      rect.setAttribute("x", x.toFixed(2));
      rect.setAttribute("width", width.toFixed(2));
      rect.setAttribute("height", "1");
      x += width;
      return rect;
    }),
  );
  return svg;
}

export function newStageBar() {
  return document.createElementNS(SVG, "svg");
}
