/* What the event stream says, put together again: its first event has everything, later ones what changed
 * (`http/fleet/changes.py`). Pure. */

/** As many ended requests as the router keeps. */
const KEPT_REQUESTS = 64;

export class Changes {
  #instances = new Map();
  #ended = new Map();

  /** @param event of the stream @returns the snapshot that `GET /cluster` would show, with loads in short */
  merge(event) {
    if (event.is_whole) {
      this.#instances.clear();
      this.#ended.clear();
    }
    for (const change of event.instances) {
      const known = this.#instances.get(change.name);
      this.#instances.set(change.name, known ? Object.assign({ ...known }, change) : change);
    }
    const running = [];
    for (const request of event.requests) {
      if (request.ended_at_s === null) running.push(request);
      else this.#ended.set(request.room, request);
    }
    for (const room of this.#ended.keys()) {
      if (this.#ended.size <= KEPT_REQUESTS) break;
      this.#ended.delete(room);
    }
    const instances = [...this.#instances.values()].sort(inOrder);
    return { ...event, instances, requests: [...this.#ended.values(), ...running] };
  }
}

const ROLES = ["prefill", "decode", "unified", "encode"];

/** P first, then by rank: an instance that joined comes last in the stream. */
function inOrder(a, b) {
  return ROLES.indexOf(a.role) - ROLES.indexOf(b.role) || Number(a.name.slice(1)) - Number(b.name.slice(1));
}
