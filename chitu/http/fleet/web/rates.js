/* Tokens per second of each instance, from the differences of its token counter between snapshots. Pure. */

/** Heartbeats come every half second: shorter windows would show their beat, not the load. */
const WINDOW_S = 2;
const MIN_SPAN_S = 0.9;

export class TokenRates {
  /** Instance name -> {incarnation, samples: [{timeS, tokens}]}, oldest first. */
  #series = new Map();

  observe(snapshot) {
    for (const instance of snapshot.instances) {
      if (instance.load === null) {
        this.#series.delete(instance.name);
        continue;
      }
      let series = this.#series.get(instance.name);
      if (series?.incarnation !== instance.incarnation || series.samples.at(-1).timeS > snapshot.time_s) {
        series = { incarnation: instance.incarnation, samples: [] };
        this.#series.set(instance.name, series);
      }
      const { samples } = series;
      samples.push({ timeS: snapshot.time_s, tokens: instance.load.tokens ?? 0 });
      while (samples.length > 2 && snapshot.time_s - samples[1].timeS >= WINDOW_S) samples.shift();
    }
  }

  /** Tokens per second over the last two seconds; null while too little was seen. */
  of(name) {
    const samples = this.#series.get(name)?.samples;
    if (!samples) return null;
    const first = samples[0];
    const last = samples.at(-1);
    const spanS = last.timeS - first.timeS;
    return spanS < MIN_SPAN_S ? null : (last.tokens - first.tokens) / spanS;
  }
}
