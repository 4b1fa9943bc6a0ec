/* Where everything in the topology picture lies, in CSS pixels, from its width and its instances. Pure. A small cluster
 * has a card for each instance; a large one a cell for each, and cards for the few that matter. */

/** How a card looks at one size: baselines of its texts and tops of its bars. `split`: queue left, pages right. */
const FORMS = {
  roomy: { height: 104, gap: 14, lane: 20, pad: 14, nameY: 25, queueY: 49, ticksY: 56, pagesY: 80, barY: 87 },
  dense: { height: 56, gap: 8, lane: 18, pad: 12, nameY: 20, queueY: 38, ticksY: 44, pagesY: 38, barY: 44, split: true },
  narrow: { height: 78, gap: 10, lane: 15, pad: 9, nameY: 19, queueY: 37, ticksY: 42, pagesY: 61, barY: 66 },
  tight: { height: 58, gap: 7, lane: 14, pad: 8, nameY: 17, queueY: 33, ticksY: 38, pagesY: null, barY: 48 },
};
const CAPTION_HEIGHT = 28;
const NARROW_WIDTH = 560;
const MANY_ROWS = 4;
/** With more instances, or more rows of cards, there are cells. A change of roles changes the number of rows only. */
const MAX_CARDS = 10;
const MAX_ROWS = 8;
/** With more pairs than this only those at work are drawn, and those of the instance that is pointed at. */
const MANY_PAIRS = 12;
const DOT_SPACING = 11;

/** Distances between cells: the largest at which the higher field has at most `FIELD_HEIGHT` is used, or the last. */
const PITCHES = [36, 30, 24, 20, 16, 13, 11, 9, 7];
const FIELD_HEIGHT = 190;
/** Cells at least so far apart have their names in them. */
const NAMED_PITCH = 30;
const SCALE_HEIGHT = 30;
export const FEATURED = { wide: 3, narrow: 2 };

/**
 * @param {number} width of the picture
 * @param {{name: string, role: string}[]} instances
 * @returns `spots`: name -> {x, y, width, height, side} of its card or cell; `form`: how cards look; `isGrid`: cells, and
 *   then `fields` (one a side: {side, columns, scale}) and `places` (boxes for the cards of the few that matter);
 *   `gap`: {left, right, y} of the top between the sides; `height`, `manyPairs`, `isNarrow`, `captions`.
 */
export function layoutOf(width, instances) {
  const named = (role) => instances.filter((instance) => instance.role === role).map(({ name }) => name);
  const [prefill, decode, unified, encode] = ["prefill", "decode", "unified", "encode"].map(named);
  const isUnified = prefill.length + decode.length === 0;
  // An E works for P.
  const sides = isUnified
    ? { right: [...unified, ...encode] }
    : { left: [...prefill, ...encode], right: [...decode, ...unified] };
  const rows = Math.max(...Object.values(sides).map((names) => names.length), 1);
  const isNarrow = width < NARROW_WIDTH;
  const isGrid = instances.length > MAX_CARDS || rows > MAX_ROWS;
  // In a large cluster dots rest on cells, and cards have no lane for them.
  const form = { ...formOf(isNarrow, isGrid || rows > MANY_ROWS), ...(isGrid && { lane: 0 }) };
  const sideWidth = Math.round(
    isUnified
      ? Math.min(width, isGrid ? 560 : 380)
      : isNarrow
        ? width * 0.385
        : isGrid
          ? Math.min(width * 0.4, 380)
          : Math.min(Math.max(width * 0.32, 204), 264),
  );
  const lefts = isUnified
    ? { right: Math.round((width - sideWidth) / 2) }
    : { left: 1, right: Math.round(width - sideWidth - 1) };
  const base = { width, form, isNarrow, isGrid, manyPairs: isGrid || prefill.length * decode.length > MANY_PAIRS };
  const captions = isUnified
    ? [{ text: encode.length > 0 ? "Unified, encode" : "Unified", side: "right", x: width / 2, anchor: "middle" }]
    : [
        { text: encode.length > 0 ? "Prefill, encode" : "Prefill", side: "left", x: 1, anchor: "start" },
        { text: unified.length > 0 ? "Decode, unified" : "Decode", side: "right", x: width - 1, anchor: "end" },
      ];
  const arranged = isGrid ? cellsOf(sides, lefts, sideWidth, form, isNarrow) : cardsOf(sides, lefts, sideWidth, form, rows);
  const gap = isUnified ? null : { left: lefts.left + sideWidth, right: lefts.right, y: CAPTION_HEIGHT };
  return { ...base, captions, captionRoom: sideWidth, gap, ...arranged };
}

function formOf(isNarrow, many) {
  if (isNarrow) return many ? FORMS.tight : FORMS.narrow;
  return many ? FORMS.dense : FORMS.roomy;
}

/** A column of cards a side, each in the middle of the height. */
function cardsOf(sides, lefts, width, form, rows) {
  const spots = new Map();
  const heightOf = (count) => count * form.height + (count - 1) * form.gap;
  for (const [side, names] of Object.entries(sides)) {
    const top = CAPTION_HEIGHT + (heightOf(rows) - heightOf(names.length)) / 2;
    names.forEach((name, row) => {
      const y = Math.round(top + row * (form.height + form.gap));
      spots.set(name, { x: lefts[side], y, width, height: form.height, side });
    });
  }
  return { spots, height: CAPTION_HEIGHT + heightOf(rows) + 2 };
}

/** A field of cells a side, and below it places for cards. */
function cellsOf(sides, lefts, width, form, isNarrow) {
  const most = Math.max(...Object.values(sides).map((names) => names.length));
  const fieldHeight = (pitch) => Math.ceil(most / Math.floor(width / pitch)) * pitch;
  const pitch = PITCHES.find((each) => fieldHeight(each) <= FIELD_HEIGHT) ?? PITCHES.at(-1);
  const columns = Math.floor(width / pitch);
  const size = pitch - (pitch > 12 ? 3 : 2);
  const spots = new Map();
  const fields = [];
  const places = {};
  const cardsTop = CAPTION_HEIGHT + fieldHeight(pitch) + SCALE_HEIGHT;
  const count = isNarrow ? FEATURED.narrow : FEATURED.wide;
  for (const [side, names] of Object.entries(sides)) {
    // The fields touch the outer edges, as the cards do.
    const x = lefts[side] + (side === "right" ? width - columns * pitch + pitch - size : 0);
    names.forEach((name, i) => {
      const [column, row] = [i % columns, Math.floor(i / columns)];
      spots.set(name, { x: x + column * pitch, y: CAPTION_HEIGHT + row * pitch, width: size, height: size, side });
    });
    fields.push({ side, columns, scale: { x: lefts[side], width, y: CAPTION_HEIGHT + fieldHeight(pitch) + 14 } });
    places[side] = Array.from({ length: Math.min(count, names.length) }, (_, i) => {
      return { x: lefts[side], y: cardsTop + i * (form.height + form.gap), width, height: form.height, side };
    });
  }
  const height = cardsTop + count * (form.height + form.gap) - form.gap + 2;
  return { spots, fields, places, height, areNamed: pitch >= NAMED_PITCH };
}

/** Where a dot of this instance rests: in the lane along its card's inner side (0 in the middle, then below and above in
 * turn), or in the middle of its cell. */
export function restPoint(layout, name, slot) {
  const spot = layout.spots.get(name);
  if (spot === undefined) return null;
  const { x, y, width, height, side } = spot;
  if (layout.isGrid) return { x: x + width / 2, y: y + height / 2 };
  const perLane = Math.floor((height - 8) / DOT_SPACING);
  const k = slot % perLane;
  const offset = (k % 2 === 0 ? -1 : 1) * Math.ceil(k / 2) * DOT_SPACING;
  return { x: side === "left" ? x + width - layout.form.lane / 2 : x + layout.form.lane / 2, y: y + height / 2 + offset };
}

/** Width of a line of letters at 11 or 12 pixels: an estimate, rather too large. */
export const widthOf = (line) => 6.9 * line.length;

/** The pairs that have a wire: all of a small cluster, else those in `active` and, between cards, those of `near`. */
export function wiresOf(layout, instances, active, near) {
  const pairs = [...active].filter((name) => name.includes("-"));
  if (!layout.manyPairs || (near !== null && !layout.isGrid)) {
    const named = (role) => instances.filter((instance) => instance.role === role).map(({ name }) => name);
    for (const p of named("prefill")) {
      for (const d of named("decode")) if (!layout.manyPairs || near === p || near === d) pairs.push(`${p}-${d}`);
    }
  }
  return new Set(pairs.filter((pair) => pair.split("-").every((name) => layout.spots.has(name))));
}

/** The two control points of the curve between two points: it leaves and arrives level. */
function controls(from, to) {
  const middle = (from.x + to.x) / 2;
  return [
    { x: middle, y: from.y },
    { x: middle, y: to.y },
  ];
}

export function curvePath(from, to) {
  const [c, d] = controls(from, to);
  return `M${from.x} ${from.y}C${c.x} ${c.y} ${d.x} ${d.y} ${to.x} ${to.y}`;
}

/** The point of that curve at `t` from 0 to 1. */
export function curvePoint(from, to, t) {
  const [c, d] = controls(from, to);
  const u = 1 - t;
  const at = (axis) =>
    u ** 3 * from[axis] + 3 * u * u * t * c[axis] + 3 * u * t * t * d[axis] + t ** 3 * to[axis];
  return { x: at("x"), y: at("y") };
}
