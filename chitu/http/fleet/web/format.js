/* Numbers as text. A number that is not known is UNKNOWN, never a guess. Pure. */

export const UNKNOWN = "–";
const NARROW_SPACE = "\u202f";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1234567 -> "1 234 567"; four digits stay together. */
export function count(value) {
  if (!isNumber(value)) return UNKNOWN;
  const digits = String(Math.round(value));
  return digits.length < 5 ? digits : digits.replace(/\B(?=(\d{3})+$)/g, NARROW_SPACE);
}

/** The same in at most five characters: 12345 -> "12.3k", with up to `digits` digits before that begins. */
export function shortCount(value, digits = 4) {
  if (!isNumber(value)) return UNKNOWN;
  if (value < 10 ** digits - 0.5) return String(Math.round(value));
  for (const [unit, size] of [["k", 1e3], ["M", 1e6], ["G", 1e9]]) {
    if (value < 999.5 * size) return `${threeDigits(value / size)}${unit}`;
  }
  return value.toExponential(1);
}

/** Powers of 1024, as everywhere in chitu: 1234567 -> "1.18 MiB" */
export function bytes(value) {
  if (!isNumber(value)) return UNKNOWN;
  if (value < 1000) return `${value} B`;
  for (const [unit, size] of [["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30]]) {
    if (value < 999.5 * size) return `${threeDigits(value / size)} ${unit}`;
  }
  return `${threeDigits(value / 2 ** 40)} TiB`;
}

/** Seconds as the unit that reads best: 0.0123 -> "12.3 ms" */
export function span(seconds) {
  if (!isNumber(seconds)) return UNKNOWN;
  if (seconds < 0.9995) return `${threeDigits(seconds * 1e3)} ms`;
  return seconds < 99.95 ? `${threeDigits(seconds)} s` : `${Math.round(seconds)} s`;
}

/** Three significant digits at most, none after the point beyond the second. */
function threeDigits(value) {
  if (value === 0) return "0";
  const decimals = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return value.toFixed(decimals);
}

/** "P0 → D1", or "U0" on a unified instance. */
export function pair(request) {
  return request.prefill === null ? request.decode : `${request.prefill} → ${request.decode}`;
}

export function shortId(id) {
  return id.length > 8 ? id.slice(0, 8) : id;
}
