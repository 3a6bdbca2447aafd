// Numbers as people read them: three or four digits that matter, and one unit for each kind of number.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const NOTHING = "–";

/** A count or a rate: 0.25, 3.14, 27.1, 483, 12,345. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  const size = Math.abs(value);
  if (size === 0 || size >= 99.95 || Number.isInteger(value)) return whole.format(value);
  return value.toFixed(size >= 9.995 ? 1 : 2);
}

/** A whole number, exactly. */
export function exact(value) {
  return value === null || value === undefined ? NOTHING : whole.format(value);
}

/** Seconds as [number, unit]: milliseconds up to ten seconds. */
export function time(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return [NOTHING, "ms"];
  if (seconds === Infinity) return ["> 30", "s"];
  if (seconds >= 9.9995) return [number(seconds), "s"];
  return [number(seconds * 1000), "ms"];
}

export const timeText = (seconds) => joined(time(seconds));

/** Bytes as [number, unit], by powers of ten. */
export function bytes(size) {
  if (size === null || size === undefined) return [NOTHING, "MB"];
  if (size >= 1e9) return [number(size / 1e9), "GB"];
  if (size >= 1e6 || size === 0) return [number(size / 1e6), "MB"];
  return [number(size / 1e3), "kB"];
}

export const bytesText = (size) => joined(bytes(size));

const joined = ([value, unit]) => (value === NOTHING ? NOTHING : `${value} ${unit}`);

/** What a request and a row are called: where all models shown read texts, each text is both. */
export const ROWS = { row: "row", rows: "rows", requests: "Requests", dispatched: "Rows" };
export const TEXTS = { row: "text", rows: "texts", requests: "Texts", dispatched: "Dispatched" };

/** A share of one, as percent. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return NOTHING;
  const value = 100 * share;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value < 100 && value >= 99.95) return "> 99.9 %";
  return `${value >= 9.95 || value === 0 ? Math.round(value) : value.toFixed(1)} %`;
}

/** Seconds since 1970 as the time of day. */
export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

/** How long ago, in the largest unit that fits. */
export function agoText(seconds) {
  const [unit, size] = [["d", 86400], ["h", 3600], ["min", 60]].find(([, each]) => seconds >= 2 * each) ?? ["s", 1];
  return `${Math.max(0, Math.floor(seconds / size))} ${unit} ago`;
}

/** How long ago, in words. */
export function ago(seconds) {
  const rounded = Math.round(seconds);
  if (rounded < 60) return `${rounded} s ago`;
  return `${Math.floor(rounded / 60)} min ${String(rounded % 60).padStart(2, "0")} s ago`;
}
