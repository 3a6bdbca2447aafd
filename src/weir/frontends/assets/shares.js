// The batches of the time shown: how large they were, why they were cut, and what took how long.

import { Bars } from "./bars.js";
import { exact, number, percent, timeText } from "./format.js";
import { mark } from "./elements.js";
import { mean, size } from "./sums.js";

const REASONS = {
  size: "as much as it may have",
  delay: "the oldest had waited long enough",
  deadline: "a response would have come too late",
  policy: "the policy's own rule",
  idle: "a worker was idle",
  drain: "nothing more will come",
  retry: "its worker had died",
  bulk: "bulk work, in time that others left",
  express: "an express call, which no policy lets wait",
};
const STEPS = {
  queue: "in queue", preprocess: "decode, preprocess", predict: "predict", postprocess: "postprocess, encode",
};

export class Shares {
  constructor(parent) {
    this.sizes = new Bars("Batch size");
    this.reasons = new Bars("Why they were cut");
    this.steps = new Bars("Mean time", "in queue: of a request; the others: of a batch");
    this.part = parent.closest("section");
    parent.append(...[this.sizes, this.reasons, this.steps].map(({ element }) => element));
  }

  /** Show what `stretch` holds. */
  show(stretch, bounds, words) {
    this.sizes.say(`${words.rows} in a batch`);
    const counts = stretch?.counts ?? {};
    this.told ||= size(counts.rows) > 0;
    mark(this.part, "data-absent", this.told ? null : "");
    this.sizes.show(sizeBars(counts.rows, bounds.rows));
    const batches = counts.batches ?? {};
    const all = Object.values(batches).reduce((a, b) => a + b, 0);
    const reasons = Object.entries(REASONS).filter(([name]) => batches[name]);
    this.reasons.show(reasons.map(([name, about]) => bar(name, batches[name], all, about)));
    this.steps.show(Object.entries(STEPS).map(([step, name]) => {
      const value = mean(counts[step]);
      return { name, value: value ?? 0, text: timeText(value) };
    }));
  }
}

function bar(name, value, all, about) {
  return { name, value, about, text: value ? `${percent(value / all)} · ${number(value)}` : "0" };
}

/** A bar for each bucket up to the largest that holds a batch. */
function sizeBars(histogram, bounds) {
  const counts = histogram?.slice(0, -1) ?? [];
  const largest = counts.findLastIndex((count) => count > 0);
  const all = size(histogram);
  return counts.slice(0, largest + 1).map((count, index) => {
    const low = index ? bounds[index - 1] + 1 : 1;
    const high = bounds[index];
    const name = high === undefined ? `over ${exact(low - 1)}` : low === high ? exact(high) : `${exact(low)} – ${exact(high)}`;
    return bar(name, count, all);
  });
}
