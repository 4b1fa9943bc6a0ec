/* The event stream of cluster snapshots: reads it, reconnects with back-off when it ends, says in which state it is.
 * One reader per page, started by main.js. A router that restarts is found again without a reload. A page that nobody
 * sees has no stream: browsers allow few connections to one server, over all tabs. */

import { Changes } from "./changes.js";
import { readEvents } from "./sse.js";

const FIRST_RETRY_MS = 250;
const LAST_RETRY_MS = 4000;
/** The router sends at least one event a second; after so long the connection is dead even if nobody said so. */
const SILENCE_MS = 10000;

export class ClusterFeed {
  #api;
  #onSnapshot;
  #onState;
  #wake = () => {};
  #abort = null;

  /**
   * @param {(snapshot: object) => void} onSnapshot
   * @param {(state: "live" | "reconnecting" | "unauthorized") => void} onState
   */
  constructor(api, onSnapshot, onState) {
    this.#api = api;
    this.#onSnapshot = onSnapshot;
    this.#onState = onState;
  }

  /** Runs as long as the page. */
  async run() {
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#abort?.abort();
    });
    let wait = FIRST_RETRY_MS;
    for (;;) {
      await this.#untilVisible();
      const failure = await this.#readOnce(() => {
        wait = FIRST_RETRY_MS;
      });
      const needsKey = failure?.code === "invalid_api_key";
      this.#onState(needsKey ? "unauthorized" : "reconnecting");
      // A refused key stays refused until somebody changes it (`reconnect`) or the server.
      if (document.hidden) continue;
      await this.#pause(needsKey ? LAST_RETRY_MS : wait);
      wait = Math.min(2 * wait, LAST_RETRY_MS);
    }
  }

  /** Try again now: the key changed, the network or the tab came back. */
  reconnect() {
    this.#abort?.abort();
    this.#wake();
  }

  async #readOnce(onFirst) {
    const abort = (this.#abort = new AbortController());
    let watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const response = await this.#api.fetch("cluster/events", { signal: abort.signal });
      const changes = new Changes();
      for await (const data of readEvents(response.body)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
        this.#show(changes.merge(JSON.parse(data)));
        onFirst();
      }
      return null;
    } catch (error) {
      return error;
    } finally {
      clearTimeout(watchdog);
      // Ends the request where the loop above was left by an error of ours.
      abort.abort();
    }
  }

  /** A failure to draw is an error of the page, and none of the connection. */
  #show(snapshot) {
    try {
      this.#onSnapshot(snapshot);
    } catch (error) {
      console.error(error);
    }
    this.#onState("live");
  }

  async #untilVisible() {
    while (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    }
  }

  #pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
