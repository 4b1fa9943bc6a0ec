/* Where everything in the topology picture lies, in CSS pixels, from its width and its instances. Pure. */

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
/** With more pairs than this only those at work are drawn, and those of the instance that is pointed at. */
const MANY_PAIRS = 12;
const DOT_SPACING = 11;

/**
 * @param {number} width of the picture
 * @param {{name: string, role: string}[]} instances
 * @returns `cards`: name -> {x, y, width, height, side}; `pairs`: "P0-D1" -> [from, to] (points);
 *   `form`: how cards look; `height`, `manyPairs`, `isNarrow`, `captions`.
 */
export function layoutOf(width, instances) {
  const named = (role) => instances.filter((instance) => instance.role === role).map(({ name }) => name);
  const prefill = named("prefill");
  const decode = named("decode");
  const unified = named("unified");
  const isUnified = prefill.length + decode.length === 0;
  const right = [...decode, ...(isUnified ? [] : unified)];
  const rows = Math.max(prefill.length, right.length, isUnified ? unified.length : 0, 1);
  const isNarrow = width < NARROW_WIDTH;
  const many = rows > MANY_ROWS;
  const form = isNarrow ? (many ? FORMS.tight : FORMS.narrow) : many ? FORMS.dense : FORMS.roomy;
  const cardWidth = isUnified
    ? Math.min(width, 380)
    : Math.min(isNarrow ? width * 0.385 : Math.max(width * 0.32, 204), 264);
  const rowsHeight = rows * form.height + (rows - 1) * form.gap;

  const cards = new Map();
  const place = (names, x, side) => {
    const columnHeight = names.length * form.height + (names.length - 1) * form.gap;
    const top = CAPTION_HEIGHT + (rowsHeight - columnHeight) / 2;
    names.forEach((name, row) => {
      const y = top + row * (form.height + form.gap);
      cards.set(name, { x: Math.round(x), y: Math.round(y), width: Math.round(cardWidth), height: form.height, side });
    });
  };
  if (isUnified) {
    place(unified, (width - cardWidth) / 2, "right");
  } else {
    place(prefill, 1, "left");
    place(right, width - cardWidth - 1, "right");
  }

  const pairs = new Map();
  for (const p of prefill) {
    for (const d of decode) {
      pairs.set(`${p}-${d}`, [lanePoint(cards.get(p), form, 0), lanePoint(cards.get(d), form, 0)]);
    }
  }
  const captions = isUnified
    ? [{ text: "Unified", x: width / 2, anchor: "middle" }]
    : [
        { text: "Prefill", x: 1, anchor: "start" },
        { text: "Decode", x: width - 1, anchor: "end" },
      ];
  return {
    width,
    height: CAPTION_HEIGHT + rowsHeight + 2,
    form,
    isNarrow,
    cards,
    pairs,
    captions,
    manyPairs: pairs.size > MANY_PAIRS,
  };
}

/** Centre of a dot's place in the lane along a card's inner side: 0 in the middle, then below and above in turn. */
export function lanePoint(card, form, slot) {
  const perLane = Math.floor((card.height - 8) / DOT_SPACING);
  const k = slot % perLane;
  const offset = (k % 2 === 0 ? -1 : 1) * Math.ceil(k / 2) * DOT_SPACING;
  const x = card.side === "left" ? card.x + card.width - form.lane / 2 : card.x + form.lane / 2;
  return { x, y: card.y + card.height / 2 + offset };
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
