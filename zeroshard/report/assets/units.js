// Numbers as text. Bytes are binary (GiB = 2**30), other prefixes decimal.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["", "k", "M", "B", "T"];

/** Returns the binary unit in which `nbytes` has one to four digits, as its exponent of 1024. */
export function binaryUnit(nbytes) {
  let exponent = 0;
  for (let rest = Math.abs(nbytes); rest >= 1024 && exponent < BINARY.length - 1; rest /= 1024) exponent += 1;
  return exponent;
}

/** Three significant digits, never an exponent. */
export function threeDigits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return Math.round(value).toLocaleString("en-US");
  if (size >= 10) return value.toFixed(1);
  return size >= 1 ? value.toFixed(2) : value.toPrecision(2);
}

export function bytesText(nbytes, exponent = binaryUnit(nbytes)) {
  const value = nbytes / 1024 ** exponent;
  return `${exponent ? threeDigits(value) : Math.round(value).toLocaleString("en-US")} ${BINARY[exponent]}`;
}

/** Bytes of a round number, without digits that say nothing. */
export function byteTickText(nbytes) {
  const exponent = binaryUnit(nbytes);
  return `${Number((nbytes / 1024 ** exponent).toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 4 })} ${BINARY[exponent]}`;
}

/** The rounded text, and the exact number of bytes. */
export function exactBytes(nbytes) {
  return nbytes < 1024 ? bytesText(nbytes) : `${bytesText(nbytes)} (${Math.round(nbytes).toLocaleString("en-US")} B)`;
}

export function countText(value) {
  let exponent = 0;
  let rest = Math.abs(value);
  for (; rest >= 1000 && exponent < DECIMAL.length - 1; rest /= 1000) exponent += 1;
  return exponent ? `${threeDigits(value / 1000 ** exponent)}${DECIMAL[exponent]}` : plainNumber(value);
}

/** A round number with a decimal prefix, without digits that say nothing. */
export function countTickText(value) {
  return countText(value)
    .replace(/(\.\d*?)0+(?=\D|$)/, "$1")
    .replace(/\.(?=\D|$)/, "");
}

export function plainNumber(value) {
  return Number.isInteger(value) ? value.toLocaleString("en-US") : threeDigits(value);
}

export function secondsText(seconds) {
  const size = Math.abs(seconds);
  if (size >= 1 || size === 0) return `${threeDigits(seconds)} s`;
  return size >= 1e-3 ? `${threeDigits(seconds * 1e3)} ms` : `${threeDigits(seconds * 1e6)} µs`;
}

/** Texts of the times of an axis: one unit, and as many digits as tell neighbours apart. */
export function timeTickTexts(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
  const high = Math.abs(ticks.at(-1));
  const [scale, unit] = high >= 1 ? [1, "s"] : high >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step * scale) - 1e-9));
  return new Map(ticks.map((tick) => [tick, `${(tick * scale).toFixed(digits)} ${unit}`]));
}

/** Text of a number in a named unit; "B" is bytes, "s" is seconds. */
export function valueText(value, unit) {
  if (unit === "B") return bytesText(value);
  if (unit === "s") return secondsText(value);
  return `${Math.abs(value) >= 1e5 ? countText(value) : plainNumber(value)}${unit ? ` ${unit}` : ""}`;
}

export function percentText(ratio, digits = 1) {
  return `${ratio > 0 ? "+" : ratio < 0 ? "−" : ""}${Math.abs(100 * ratio).toFixed(digits)}%`;
}

/** Round numbers from `low` to `high`, about `count` of them. */
export function roundTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high * (1 + 1e-12) + 1e-300; place += 1)
    ticks.push(place * step + 0); // + 0: never -0
  return ticks;
}

/** Round numbers of bytes, in the unit of the highest. */
export function byteTicks(high, count, low = 0) {
  const scale = 1024 ** binaryUnit(high);
  return roundTicks(low / scale, high / scale, count).map((value) => value * scale);
}

/** Round values in a unit on a logarithmic axis. */
export function logUnitTicks(low, high, unit) {
  const scale = unit === "B" ? 1024 ** binaryUnit(high) : 1;
  return logTicks(low / scale, high / scale).map((tick) => tick * scale);
}

/** Text of a round value in a unit. */
export function tickText(value, unit) {
  if (unit === "B") return byteTickText(value);
  return unit === "s" ? secondsText(value).replace(/\.0+ /, " ") : countTickText(value);
}

/** 1, 2 and 5 times powers of ten between two positive numbers; only powers where there are many. */
export function logTicks(low, high) {
  const ticks = [];
  const factors = Math.log10(high / low) > 2.5 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  return ticks.length ? ticks : [low, high];
}
