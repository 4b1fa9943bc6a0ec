/* Wires the page: one API object, one event stream, and the parts that show what it says. */

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { ClusterFeed } from "./cluster.js";
import { TokenRates } from "./rates.js";
import { showCommands } from "./commands.js";
import { RequestTable } from "./requests.js";
import { setText } from "./svg.js";
import { TimelineView } from "./timeline.js";
import { Topology } from "./topology.js";
import { showHeader, showTotals } from "./totals.js";

/** Only this model was taught the examples. */
const EXAMPLE_MODEL = "chitu-tiny";
const KEY_STORE = "chitu.api-key";
const KEY_PAUSE_MS = 400;
const HAS_POINTER = matchMedia("(hover: hover)").matches;
const POINT_HINT = HAS_POINTER ? "Point at an instance, or tab to it, to see more of it." : "Tap an instance to see more of it.";

const byId = (id) => document.getElementById(id);

const api = new Api();
const rates = new TokenRates();
const chat = new Chat(api, {
  composer: byId("composer"),
  prompt: byId("prompt"),
  attach: byId("attach"),
  files: byId("files"),
  attached: byId("attached"),
  send: byId("send"),
  stop: byId("stop"),
  clear: byId("clear"),
  examples: [...document.querySelectorAll('[data-press="example"]')],
  bursts: [...document.querySelectorAll('[data-press="burst"]')],
  note: byId("composer-note"),
  modeChat: byId("mode-chat"),
  modeCompletion: byId("mode-completion"),
  maxTokens: byId("max-tokens"),
  temperature: byId("temperature"),
  settings: byId("settings"),
  log: byId("messages"),
  welcome: byId("welcome"),
  first: byId("first-prompt"),
});
const topology = new Topology(byId("topology"), rates, (text) => {
  const line = text ?? POINT_HINT;
  if (byId("detail").textContent !== line) byId("detail").textContent = line;
});
const table = new RequestTable(byId("requests").tBodies[0], byId("no-requests"), (pair) => topology.pointAtPair(pair));
const totals = {
  inFlight: byId("total-in-flight"),
  prefillRate: byId("total-prefill-rate"),
  decodeRate: byId("total-decode-rate"),
  kv: byId("total-kv"),
  firstToken: byId("total-ttft"),
};
const advice = byId("advice");
const header = { model: byId("model"), shape: byId("shape"), more: byId("more") };

function show(snapshot) {
  rates.observe(snapshot);
  showHeader(header, snapshot);
  showTotals(totals, snapshot, rates);
  topology.update(snapshot);
  table.update(snapshot.requests, snapshot.time_s);
  chat.observe(snapshot);
  document.body.classList.toggle("has-examples", snapshot.model === EXAMPLE_MODEL);
  document.body.classList.toggle("sees-images", snapshot.instances.some(({ load }) => load?.image_rows > 0));
  setText(advice, snapshot.advice ?? "");
  showCommands(byId("commands"), snapshot.instances);
}

const STATE_WORDS = { live: "live", reconnecting: "reconnecting", unauthorized: "API key needed" };

function showState(state) {
  const connection = byId("connection");
  if (connection.dataset.state === state && connection.dataset.known) return;
  connection.dataset.state = state;
  connection.dataset.known = "true";
  connection.querySelector(".word").textContent = STATE_WORDS[state];
  if (state === "unauthorized") byId("settings").open = true;
}

const feed = new ClusterFeed(api, show, showState);

for (const menu of document.querySelectorAll(".menu")) {
  document.addEventListener("pointerdown", ({ target }) => {
    if (!menu.contains(target)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    // Elsewhere Escape stops the stream.
    event.stopPropagation();
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}

// The key lives as long as the tab: storage that outlasts it is no place for a secret.
const keyInput = byId("api-key");
let keyTimer = 0;
function useKey(key) {
  if (key.trim() === api.key) return;
  api.key = key;
  try {
    sessionStorage.setItem(KEY_STORE, api.key);
  } catch {
    // Storage is forbidden: the key lasts as long as the page.
  }
  feed.reconnect();
}
try {
  keyInput.value = sessionStorage.getItem(KEY_STORE) ?? "";
} catch {
  // As above.
}
api.key = keyInput.value;
keyInput.addEventListener("change", () => useKey(keyInput.value));
keyInput.addEventListener("input", () => {
  clearTimeout(keyTimer);
  keyTimer = setTimeout(() => useKey(keyInput.value), KEY_PAUSE_MS);
});
addEventListener("online", () => feed.reconnect());

new TimelineView(api, {
  section: byId("life"),
  title: byId("life-title"),
  drawing: byId("timeline"),
  notes: byId("life-notes"),
  close: byId("life-close"),
});

// On a phone the keyboard would cover the picture.
if (matchMedia("(pointer: fine)").matches) byId("prompt").focus({ preventScroll: true });
feed.run();
