/* How much an instance has to do, and which few of a side deserve a card. Pure. */

export const SCALES = {
  prefill: { text: "requests", least: "0", most: "8+" },
  decode: { text: "pages", least: "0", most: "75 %+" },
};
/** Cards of the busiest stay for so long, so that they can be read; a broken instance is shown at once. */
const HOLD_S = 2;

const numbersOf = (load) => ["waiting", "transferring", "running"].map((field) => load?.[field] ?? 0);

export const requestsThere = (load) => numbersOf(load).reduce((sum, number) => sum + number, 0);

export const isIdle = ({ load }) => requestsThere(load) === 0;

/** 0 (nothing to do) to 4: of P and E by their requests, of the others by the pages in use, and 4 if requests wait for them. */
export function heatOf({ role, load }) {
  const there = requestsThere(load);
  if (there === 0) return 0;
  if (role === "prefill" || role === "encode") return 1 + [2, 4, 8].filter((bound) => there >= bound).length;
  const share = (load.pages_used ?? 0) / (load.pages_total || 1);
  return load.waiting ? 4 : 1 + [0.25, 0.5, 0.75].filter((bound) => share >= bound).length;
}

/** The state in one word, as it is shown: `becomes D5` before `draining`, which it implies. */
export function stateOf({ status, becomes, load }) {
  if (becomes && status !== "down") return "becoming";
  return load?.suspended?.length && status === "up" ? "suspended" : status;
}

const TROUBLE = { down: 3, suspended: 2, becoming: 1, draining: 1, asleep: 1, up: 0 };

/** Names of the `count` instances of one side that deserve a card: the broken ones, then the busiest. */
export class Featured {
  #names = [];
  #chosenAtS = Number.NEGATIVE_INFINITY;
  #troubled = "";

  /** @returns {string[]} the same array while it says the same */
  choose(instances, count, nowS) {
    const troubled = instances.filter((each) => stateOf(each) !== "up").map((each) => each.name + stateOf(each)).join();
    const isKept = troubled === this.#troubled && Math.abs(nowS - this.#chosenAtS) < HOLD_S;
    if (isKept && this.#names.length > 0) return this.#names;
    [this.#troubled, this.#chosenAtS] = [troubled, nowS];
    const rank = (each) => [TROUBLE[stateOf(each)], heatOf(each), requestsThere(each.load)];
    const ranked = instances.map((each) => ({ name: each.name, rank: rank(each) }));
    // Sorting is stable: of equals the first rank comes first. The busiest has a place in any case.
    ranked.sort(({ rank: a }, { rank: b }) => b[0] - a[0] || b[1] - a[1] || b[2] - a[2]);
    const broken = ranked.filter(({ rank: [trouble] }) => trouble > 0).slice(0, count - 1);
    const busy = ranked.filter(({ rank: [trouble] }) => trouble === 0).slice(0, count - broken.length);
    const names = [...broken, ...busy].map(({ name }) => name);
    if (names.join() !== this.#names.join()) this.#names = names;
    return this.#names;
  }
}

/** "2 down, 1 draining": how many instances of a side are not simply up; in short if that has more letters than there is
 * room for. */
export function troubleText(instances, letters) {
  const counts = new Map();
  for (const each of instances) counts.set(stateOf(each), (counts.get(stateOf(each)) ?? 0) + 1);
  const said = Object.keys(TROUBLE).filter((state) => state !== "up" && counts.has(state));
  const text = said.map((state) => `${counts.get(state)} ${state === "becoming" ? "changing" : state}`).join(", ");
  return text.length <= letters ? text : `${instances.length - (counts.get("up") ?? 0)} not up`;
}
