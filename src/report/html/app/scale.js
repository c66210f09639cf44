// Colours of numbers, and the patterns of what has no number.

/** Viridis of matplotlib, which is as even to people who are colour-blind: from the smallest to the largest. */
const VIRIDIS = [
  [68, 1, 84],
  [72, 40, 120],
  [62, 73, 137],
  [49, 104, 142],
  [38, 130, 142],
  [31, 158, 137],
  [53, 183, 121],
  [110, 206, 88],
  [181, 222, 43],
  [253, 231, 37],
];

const DARK = matchMedia("(prefers-color-scheme: dark)");

let isPrinting = false;

function isDark() {
  return DARK.matches && !isPrinting;
}

/** A colour of the style sheet. */
function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The colour at a place from 0 to 1; what is larger stands out more against the page. */
function colorAt(place) {
  const at = (isDark() ? place : 1 - place) * (VIRIDIS.length - 1);
  const index = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const [low, high] = [VIRIDIS[index], VIRIDIS[index + 1]];
  const parts = low.map((part, channel) => Math.round(part + (high[channel] - part) * (at - index)));
  return `rgb(${parts.join(" ")})`;
}

/** A logarithmic scale over whole decades. */
class LogScale {
  constructor(values) {
    let [least, most] = [Infinity, 0];
    for (const value of values) {
      if (value > 0 && value < least) least = value;
      if (value > most && value < Infinity) most = value;
    }
    this.isEmpty = most === 0;
    this.low = this.isEmpty ? -1 : Math.floor(Math.log10(least));
    this.high = this.isEmpty ? 0 : Math.max(Math.ceil(Math.log10(most)), this.low + 1);
  }

  /** The place of a number from 0 to 1. */
  place(value) {
    return clamp((Math.log10(value) - this.low) / (this.high - this.low), 0, 1);
  }

  /** Powers of ten, no more than this many. */
  ticks(most) {
    const step = Math.ceil((this.high - this.low) / most);
    const ticks = [];
    for (let power = this.low; power <= this.high; power += step) ticks.push(power);
    return ticks;
  }
}

/** Draws a cell: a colour for a number, a pattern for what has none. */
function drawCell(context, x, y, width, height, { kind, value }, scale) {
  const painter = PAINTERS[kind];
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  painter(context, x, y, width, height, value, scale);
  context.restore();
}

const PAINTERS = {
  number(context, x, y, width, height, value, scale) {
    context.fillStyle = colorAt(scale.place(value));
    context.fillRect(x, y, width, height);
  },
  equal(context, x, y, width, height) {
    context.fillStyle = ink("cell-equal");
    context.fillRect(x, y, width, height);
    context.fillStyle = ink("cell-mark");
    context.fillRect(x + width / 2 - 1, y + height / 2 - 1, 2, 2);
  },
  alone(context, x, y, width, height) {
    context.strokeStyle = ink("cell-alone");
    context.lineWidth = 1.5;
    for (let offset = -height; offset < width; offset += 5) {
      line(context, x + offset, y + height, x + offset + height, y);
    }
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  },
  undefined(context, x, y, width, height) {
    context.fillStyle = ink("cell-undefined");
    context.fillRect(x, y, width, height);
    context.strokeStyle = ink("page");
    context.lineWidth = 1.5;
    line(context, x, y, x + width, y + height);
    line(context, x, y + height, x + width, y);
  },
  absent() {},
};

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

/** A canvas of this size in the pixels of the page, sharp on every screen. */
function sharpCanvas(canvas, width, height) {
  const density = Math.min(devicePixelRatio || 1, 3);
  canvas.width = Math.ceil(width * density);
  canvas.height = Math.ceil(height * density);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const SWATCHES = [
  ["equal", "equal"],
  ["alone", "on one side only"],
  ["undefined", "no number: NaN, other shape, b all zeros, unread"],
  ["absent", "no such tensor"],
];

/** The legend of the colours of a scale and of the patterns. */
function legend(scale, title) {
  const swatches = SWATCHES.map(([kind, text]) => make("span", { class: "swatch" }, swatch(kind), text));
  return [scale.isEmpty ? null : gradient(scale, title), ...swatches].filter(isContent);
}

function swatch(kind) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const context = sharpCanvas(canvas, 22, 16);
  context.strokeStyle = ink("rule");
  context.strokeRect(0.5, 0.5, 21, 15);
  drawCell(context, 1, 1, 20, 14, { kind, value: 0 }, null);
  return canvas;
}

function gradient(scale, title) {
  const width = 260;
  const canvas = make("canvas", { "aria-hidden": "true" });
  const context = sharpCanvas(canvas, width, 12);
  for (let x = 0; x < width; x += 1) {
    context.fillStyle = colorAt(x / (width - 1));
    context.fillRect(x, 0, 1, 12);
  }
  const tick = (power) => {
    const label = make("span", { class: "tick" }, `1e${power}`);
    label.style.left = `${scale.place(10 ** power) * width}px`;
    return label;
  };
  const bar = make(
    "span",
    { class: "gradient" },
    canvas,
    make("span", { class: "ticks" }, scale.ticks(6).map(tick)),
  );
  return make("span", { class: "swatch" }, title, bar);
}
