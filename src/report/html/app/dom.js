// Elements, text and numbers. All text goes in as text nodes or attributes, never as markup.

/** Characters that are not seen but obeyed: they are shown as escapes, as in the terminal. */
const CONTROL = /[\p{Cc}\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/gu;

const NO_VALUE = "–";

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

function printable(text) {
  return String(text).replace(CONTROL, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
}

/** Makes an element. Attributes that are functions are listeners; those that are null or false are left out. */
function make(tag, attributes = {}, ...children) {
  return fitted(document.createElement(tag), attributes, children);
}

/** Makes an element of a drawing. */
function draw(tag, attributes = {}, ...children) {
  return fitted(document.createElementNS(SVG, tag), attributes, children);
}

function fitted(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : printable(value));
    }
  }
  element.append(...children.flat().filter(isContent).map(content));
  return element;
}

function isContent(child) {
  return child !== null && child !== undefined && child !== false;
}

function content(child) {
  return child instanceof Node ? child : printable(child);
}

/** Puts a section with these contents on the page. */
function show(id, ...children) {
  const section = byId(id);
  section.querySelector(".body").replaceChildren(...children.flat().filter(isContent));
  section.hidden = false;
}

/** `1,234,567`. */
function grouped(number) {
  return number.toLocaleString("en-US");
}

/** `1 tensor`, `51 tensors`. */
function counted(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Four digits and an exponent; small whole numbers as they are. */
function scientific(number) {
  if (number === null || Number.isNaN(number)) return NO_VALUE;
  const isShort = Number.isInteger(number) && Math.abs(number) < 10000;
  return isShort ? String(number) : number.toExponential(3).replace("e+", "e");
}

/** `12.3 %`; what is not all or nothing never looks as if it were. */
function percent(part, whole) {
  if (whole === 0 || part === 0) return "0 %";
  if (part === whole) return "100 %";
  const share = Math.min(Math.max((100 * part) / whole, 0.01), 99.99);
  return `${share.toFixed(share < 10 || share > 99 ? 2 : 1)} %`;
}

/** Decimal bytes with three digits: `1.94 GB`. */
function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
  let value = count;
  let unit = 0;
  while (value >= 999.5 && unit + 1 < units.length) {
    value /= 1000;
    unit += 1;
  }
  const decimals = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(decimals)} ${units[unit]}`;
}

/** The text without its middle, where it is longer than this. */
function shortened(text, length) {
  const shown = printable(text);
  if (shown.length <= length) return shown;
  const start = Math.ceil((length - 1) / 2);
  return `${shown.slice(0, start)}…${shown.slice(shown.length - (length - 1 - start))}`;
}

function clamp(value, smallest, largest) {
  return Math.min(Math.max(value, smallest), largest);
}

/** A table of headings and rows of text; `numeric` says which columns are numbers. */
function plainTable(headings, rows, numeric = []) {
  const cell = (tag, text, at) => make(tag, { class: numeric.includes(at) ? "number" : null }, text);
  return make(
    "div",
    { class: "scroll" },
    make(
      "table",
      {},
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          headings.map((text, at) => cell("th", text, at)),
        ),
      ),
      make(
        "tbody",
        {},
        rows.map((row) =>
          make(
            "tr",
            {},
            row.map((text, at) => cell("td", text, at)),
          ),
        ),
      ),
    ),
  );
}
