/* The row of numbers above the picture, and the line in the header. */

import { UNKNOWN, bytes, count, shortCount, span } from "./format.js";
import { isIdle } from "./heat.js";
import { firstTokenS } from "./stages.js";
import { setData, setText } from "./svg.js";

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Rates of all instances of these roles that are up; null where none is known. */
function totalRate(instances, rates, roles) {
  const known = instances.filter(({ role }) => roles.includes(role)).map(({ name }) => rates.of(name));
  const numbers = known.filter((rate) => rate !== null);
  return numbers.length > 0 ? sum(numbers) : null;
}

/** Median time to first token of the requests in the snapshot, as the router saw it; null without any. */
function medianFirstToken(requests) {
  const times = requests.map(firstTokenS).filter((seconds) => seconds !== null).sort((a, b) => a - b);
  if (times.length === 0) return null;
  const middle = times.length >> 1;
  return times.length % 2 === 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
}

export function showTotals(ui, snapshot, rates) {
  const { instances, requests } = snapshot;
  setText(ui.inFlight, count(snapshot.in_flight));
  const isUnified = instances.every(({ role }) => role === "unified" || role === "encode");
  // A rate is one of the last two seconds, and a first token may be long ago: dimmed while nothing adds to it.
  const areIdle = (roles) => instances.every((instance) => !roles.includes(instance.role) || isIdle(instance));
  setData(ui.prefillRate, { past: areIdle(["prefill"]) });
  setData(ui.decodeRate, { past: areIdle(["decode", "unified"]) });
  setData(ui.firstToken, { past: snapshot.in_flight === 0 });
  // A unified instance counts the tokens that it emits.
  setText(ui.prefillRate, isUnified ? UNKNOWN : shortCount(totalRate(instances, rates, ["prefill"])));
  setText(ui.decodeRate, shortCount(totalRate(instances, rates, ["decode", "unified"])));
  const senders = instances.filter(({ role, load }) => role === "prefill" && load !== null);
  setText(ui.kv, senders.length > 0 ? bytes(sum(senders.map(({ load }) => load.bytes_moved ?? 0))) : UNKNOWN);
  setText(ui.firstToken, span(medianFirstToken(requests)));
}

export function showHeader(ui, snapshot) {
  setText(ui.model, snapshot.model);
  const number = (role) => snapshot.instances.filter((instance) => instance.role === role).length;
  const shape = [["prefill", "P"], ["decode", "D"], ["unified", "U"], ["encode", "E"]]
    .map(([role, letter]) => (number(role) > 0 ? `${number(role)}${letter}` : ""))
    .join("");
  const context = snapshot.max_model_len === null ? "" : ` · ${count(snapshot.max_model_len)} tokens`;
  setText(ui.shape, shape);
  setText(ui.more, `${context} · version ${snapshot.version}`);
}
