/* Wires the page: one API object, one event stream, and the parts that show what it says. */

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { ClusterFeed } from "./cluster.js";
import { TokenRates } from "./rates.js";
import { RequestTable } from "./requests.js";
import { TimelineView } from "./timeline.js";
import { Topology } from "./topology.js";
import { showHeader, showTotals } from "./totals.js";

/** Only this model was taught the examples. */
const EXAMPLE_MODEL = "chitu-tiny";
const KEY_STORE = "chitu.api-key";
const KEY_PAUSE_MS = 400;
const POINT_HINT = "Point at an instance, or tab to it, to see more of it.";

const byId = (id) => document.getElementById(id);

const api = new Api();
const rates = new TokenRates();
const chat = new Chat(api, {
  composer: byId("composer"),
  prompt: byId("prompt"),
  send: byId("send"),
  stop: byId("stop"),
  clear: byId("clear"),
  example: byId("example"),
  burst: byId("burst"),
  note: byId("composer-note"),
  modeChat: byId("mode-chat"),
  maxTokens: byId("max-tokens"),
  temperature: byId("temperature"),
  settings: byId("settings"),
  log: byId("messages"),
  welcome: byId("welcome"),
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
const header = { model: byId("model"), shape: byId("shape"), more: byId("more") };

function show(snapshot) {
  rates.observe(snapshot);
  showHeader(header, snapshot);
  showTotals(totals, snapshot, rates);
  topology.update(snapshot);
  table.update(snapshot.requests, snapshot.time_s);
  chat.observe(snapshot);
  const hasExamples = snapshot.model === EXAMPLE_MODEL;
  byId("example").hidden = byId("burst").hidden = !hasExamples;
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

// The panel of settings closes like a menu.
const settings = byId("settings");
document.addEventListener("pointerdown", ({ target }) => {
  if (!settings.contains(target)) settings.open = false;
});
settings.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !settings.open) return;
  // Elsewhere Escape stops the stream.
  event.stopPropagation();
  settings.open = false;
  settings.querySelector("summary").focus();
});

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
