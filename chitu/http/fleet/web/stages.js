/* Where a request's time went: its stages as numbers, as a small stacked bar, as text. */

import { span } from "./format.js";

export const isRunning = (request) => request.state === "prefill" || request.state === "decode";

/** The stages of a request in order, as the router tells them when it has ended (`protocol/account.py`); until then, the
 * time to its first token and the time since, at `nowS` on the router's clock. */
export function stagesOf(request, nowS) {
  const { stages } = request;
  if (stages !== null) return Object.entries(stages).map(([field, seconds]) => ({ name: field.slice(0, -2), seconds }));
  const total = totalS(request, nowS);
  const first = firstTokenS(request);
  if (first === null) return [{ name: "prefill", seconds: total }];
  return [{ name: "prefill", seconds: first }, { name: "decode", seconds: Math.max(0, total - first) }];
}

/** From the attempt to its end, or until `nowS` while it runs, in seconds. */
export function totalS(request, nowS) {
  return Math.max(0, (request.ended_at_s ?? nowS) - request.created_at_s);
}

const COLOURED = ["prefill", "compute", "transfer", "decode"];

/** The stages in few numbers: those of one colour are one. The stages that wait come first. */
export function byColour(parts) {
  const waits = parts.filter(({ name }) => !COLOURED.includes(name));
  const seconds = waits.reduce((sum, part) => sum + part.seconds, 0);
  return [...(waits.length > 0 ? [{ name: "waits", seconds }] : []), ...parts.filter((part) => !waits.includes(part))];
}

/** "queue 1 ms · compute 210 ms · transfer 14 ms · decode 640 ms" */
export function stagesText(parts) {
  return parts.map(({ name, seconds }) => `${name.replace("_", " ")} ${span(seconds)}`).join(" · ");
}

/** Time to first token as the router saw it, in seconds; null before it. */
export function firstTokenS(request) {
  return request.first_token_at_s === null ? null : request.first_token_at_s - request.created_at_s;
}

const COLOURS = { compute: "prefill", transfer: "transfer", decode: "decode" };

/** Colour of a stage as the style sheet names it; what has none of its own waits. */
export const colourOf = (stage) => COLOURS[stage] ?? "queue";

/** Draws shares of `parts` into a bar. `prefill` is not yet known in parts: there the hatched ground of the bar shows. */
export function drawStageBar(bar, parts) {
  const total = parts.reduce((sum, { seconds }) => sum + seconds, 0);
  let end = 0;
  const stops = (total > 0 ? parts : []).map(({ name, seconds }) => {
    const start = end;
    end += (100 * seconds) / total;
    const colour = name === "prefill" ? "transparent" : `var(--${colourOf(name)})`;
    return `${colour} ${start.toFixed(2)}% ${end.toFixed(2)}%`;
  });
  const drawn = stops.length > 0 ? `linear-gradient(to right, ${stops.join(", ")})` : "";
  if (bar.style.getPropertyValue("--shares") !== drawn) bar.style.setProperty("--shares", drawn);
  return bar;
}

export function newStageBar() {
  const bar = document.createElement("i");
  bar.className = "stage-bar";
  bar.setAttribute("aria-hidden", "true");
  return bar;
}
