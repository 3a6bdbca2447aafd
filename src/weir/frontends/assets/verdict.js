// One line on how the server does. It changes seldom, for it is read aloud when it does.

import { ends, endsWith } from "./sums.js";

/** [text, mood] from the last seconds of all models. */
export function verdict(models, recent) {
  const waiting = Object.entries(models).find(([, { ready }]) => ready === false);
  if (waiting) return [`${waiting[0]} takes no requests: ${waiting[1].reason}`, "warn"];
  if (!recent) return ["Connected", "quiet"];
  const [good, bad] = ends(recent.counts);
  if (endsWith(recent.counts, "Overloaded") > 0) return ["Overloaded: requests are refused", "bad"];
  if (bad > 0.01 * (good + bad)) return ["Requests fail", "warn"];
  if (good) return ["Keeping up", "good"];
  return [recent.levels.running ? "At work" : "Idle", "quiet"];
}
