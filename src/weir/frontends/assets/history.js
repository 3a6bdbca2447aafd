// The samples of the last fifteen minutes of one process, and what they say of a stretch of time.

import { add, ofModel } from "./sums.js";

const KEPT_SECONDS = 900;
const RECENT_SECONDS = 5; // what "now" is averaged over
const BINS = { 60: 1, 300: 2, 900: 5 }; // seconds that one point of a chart stands for, by the seconds shown
const LEVELS = ["waiting", "waiting_requests", "waiting_bulk", "oldest", "running", "busy"];

export class History {
  samples = [];
  last = 0; // the number of the newest

  /** Take samples in, in their order; those that are known already change nothing. */
  take(samples) {
    for (const sample of samples) {
      if (sample.number <= this.last) continue;
      this.last = sample.number;
      this.samples.push(sample);
    }
    const oldest = (this.samples.at(-1)?.at ?? 0) - KEPT_SECONDS;
    const kept = this.samples.findIndex((sample) => sample.at > oldest);
    if (kept > 0) this.samples.splice(0, kept);
  }

  get now() {
    return this.samples.at(-1)?.at ?? 0;
  }

  /** The points of a chart over `span` seconds: a stretch each, null where nothing is known. The last ends now. */
  bins(span, label) {
    const width = BINS[span];
    const count = span / width;
    const bins = Array.from({ length: count }, () => []);
    const end = Math.ceil(this.now / width) * width;
    const place = (at) => count - 1 - Math.floor((end - at) / width);
    for (let index = this.samples.length - 1; index >= 0; index -= 1) {
      const sample = this.samples[index];
      const last = place(sample.at);
      if (last < 0) break;
      bins[last].push(sample);
      // One that came late stands for all the time since the one before.
      for (let between = last - 1; between >= 0 && between > place(sample.at - sample.seconds); between -= 1) {
        if (!bins[between].length) bins[between].push(sample);
      }
    }
    return bins.map((samples, index) => stretch(samples, label, end - (count - 1 - index) * width));
  }

  /** The last seconds, as a stretch. */
  recent(label) {
    const since = this.now - RECENT_SECONDS;
    return stretch(this.samples.slice(-RECENT_SECONDS - 1).filter((sample) => sample.at > since), label, this.now);
  }

  /** All of the last `span` seconds, as a stretch. */
  all(span, label) {
    const since = this.now - span;
    return stretch(this.samples.filter((sample) => sample.at > since), label, this.now);
  }
}

/** What `samples` say together of the model `label`, or of all: counts are added up, of levels the highest is taken. */
function stretch(samples, label, at) {
  if (!samples.length) return null;
  const counts = Object.create(null);
  const levels = Object.create(null);
  let seconds = 0;
  let late = 0;
  for (const sample of samples) {
    const here = ofModel(sample.models, label);
    add(counts, here);
    for (const name of LEVELS) levels[name] = Math.max(levels[name] ?? 0, here[name] ?? 0);
    seconds += sample.seconds;
    late = Math.max(late, sample.late);
  }
  const newest = samples.reduce((a, b) => (a.at > b.at ? a : b));
  const oldest = samples.reduce((a, b) => (a.at < b.at ? a : b));
  return { at, seconds, late, counts, levels, machine: newest.machine, earlier: samples.length > 1 ? oldest : null, newest };
}
