// Adds samples up, and reads numbers from the sum. A sample says what changed within its seconds; what is zero is not in it.

/** Add the numbers of `more` to `sum`, in place; lists element by element. */
export function add(sum, more) {
  for (const [key, value] of Object.entries(more)) {
    if (typeof value === "number") sum[key] = (sum[key] ?? 0) + value;
    else if (Array.isArray(value)) sum[key] = value.map((each, index) => each + (sum[key]?.[index] ?? 0));
    else if (value !== null && typeof value === "object") add((sum[key] ??= Object.create(null)), value);
  }
  return sum;
}

/** All counts of a sample's models, or of the one of that label. */
export function ofModel(models, label) {
  if (label) return models[label] ?? {};
  return Object.values(models).reduce(add, Object.create(null));
}

/** [answered, failed, left] requests by how they ended; those who left did not wait for their answer. */
export function ends(counts) {
  let good = 0;
  let bad = 0;
  let left = 0;
  for (const codes of Object.values(counts.ends ?? {})) {
    for (const [code, count] of Object.entries(codes)) {
      if (answered(code)) good += count;
      else if (code.endsWith("Cancelled")) left += count;
      else bad += count;
    }
  }
  return [good, bad, left];
}

export const answered = (code) => code === "200" || code === "OK" || code === "ok";

/** How many requests ended with the error `name`. */
export function endsWith(counts, name) {
  let total = 0;
  for (const codes of Object.values(counts.ends ?? {})) {
    for (const [code, count] of Object.entries(codes)) if (code.split(" ").at(-1) === name) total += count;
  }
  return total;
}

/** The number of values in a histogram [counts..., sum]. */
export const size = (histogram) => (histogram ? histogram.slice(0, -1).reduce((a, b) => a + b, 0) : 0);

/** The sum of the values in a histogram. */
export const total = (histogram) => histogram?.at(-1) ?? 0;

/** Whether each request was one row, but for those under way: then the rows are the requests once more. */
export function isSingle(all, recent) {
  if (!all || all.counts.tokens || all.counts.parts) return false;
  const [good] = ends(all.counts);
  return Math.abs(total(all.counts.rows) - good) <= 0.02 * good + (recent?.levels.running ?? 0);
}

/** The mean; null of nothing. */
export const mean = (histogram) => (size(histogram) ? total(histogram) / size(histogram) : null);

/** A quantile, interpolated within its bucket as Prometheus' histogram_quantile does; null of nothing. */
export function quantile(share, histogram, bounds) {
  const count = size(histogram);
  if (!count) return null;
  const rank = share * count;
  let below = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    const here = histogram[index];
    if (below + here >= rank && here > 0) {
      const low = index ? bounds[index - 1] : 0;
      return low + ((bounds[index] - low) * (rank - below)) / here;
    }
    below += here;
  }
  return Infinity;
}
