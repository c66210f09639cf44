// What the page shows of the tensors: filter, order, selection. The address of the page keeps it.

const USUAL_VIEW = {
  q: "",
  verdict: "",
  sort: "-rel_l2",
  measure: "rel_l2",
  state: "",
  cell: null,
  row: null,
};

const COMPARISON = /^([a-z_12-]+)(<=|>=|<|>|=)([-+0-9.e]+)$/i;

/** Numbers that a filter may compare, by the words for them. */
const FILTER_METRICS = {
  rel_l2: "rel_l2",
  "1-cos": "one_minus_cos",
  one_minus_cos: "one_minus_cos",
  l2: "l2",
  max_abs: "max_abs",
  max_ulp: "max_ulp",
  differing: "differing",
  share: "share",
  numel: "numel",
  norm_a: "norm_a",
  norm_b: "norm_b",
  layer: "layer",
  expert: "expert",
};

const RELATIONS = {
  "<": (value, bound) => value < bound,
  "<=": (value, bound) => value <= bound,
  "=": (value, bound) => value === bound,
  ">=": (value, bound) => value >= bound,
  ">": (value, bound) => value > bound,
};

/** A view whose changes are told to those who show it. */
class View {
  constructor() {
    this.listeners = [];
    this.values = { ...USUAL_VIEW, ...fromHash(location.hash) };
    addEventListener("hashchange", () => this.restore());
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  get(name) {
    return this.values[name];
  }

  set(changes) {
    Object.assign(this.values, changes);
    keepAddress(toHash(this.values));
    this.tell(Object.keys(changes));
  }

  restore() {
    this.values = { ...USUAL_VIEW, ...fromHash(location.hash) };
    this.tell(Object.keys(USUAL_VIEW));
  }

  tell(changed) {
    this.listeners.forEach((listener) => listener(changed));
  }
}

function toHash(values) {
  const parameters = new URLSearchParams();
  for (const [name, usual] of Object.entries(USUAL_VIEW)) {
    const value = values[name];
    if (value !== usual && value !== null) {
      parameters.set(name, name === "cell" ? JSON.stringify(value) : value);
    }
  }
  return parameters.toString();
}

function fromHash(hash) {
  const values = {};
  for (const [name, value] of new URLSearchParams(hash.slice(1))) {
    if (name === "cell") values.cell = parsedCell(value);
    else if (Object.hasOwn(USUAL_VIEW, name)) values[name] = value;
  }
  return values;
}

/** A cell of the map: state, list, layer, module. */
function parsedCell(text) {
  try {
    const cell = JSON.parse(text);
    return Array.isArray(cell) && cell.length === 4 ? cell : null;
  } catch {
    return null;
  }
}

/** Changes the address without a step in the history; a page in a sandbox has no address of its own. */
function keepAddress(hash) {
  try {
    history.replaceState(null, "", hash === "" ? location.pathname + location.search : `#${hash}`);
  } catch {
    // The view still works, only no link to it.
  }
}

/** The rows that a view shows, in its order. */
function shownRows(tensors, view) {
  const tests = [...verdictTests(tensors, view), ...cellTests(tensors, view), ...queryTests(tensors, view)];
  const rows = [];
  for (let row = 0; row < tensors.count; row += 1) {
    if (tests.every((test) => test(row))) rows.push(row);
  }
  return sorted(rows, tensors, view.get("sort"));
}

function verdictTests(tensors, view) {
  const wanted = view.get("verdict");
  if (wanted === "") return [];
  if (wanted === "failing") return [(row) => !tensors.passes(row)];
  return [(row) => tensors.verdict(row) === wanted];
}

function cellTests(tensors, view) {
  const cell = view.get("cell");
  if (cell === null) return [];
  const [state, list, layer, module] = cell;
  return [
    (row) => {
      const place = tensors.place(row);
      return place.module === module && place.layer === layer && place.list === list && place.state === state;
    },
  ];
}

function queryTests(tensors, view) {
  const words = view.get("q").toLowerCase().split(/\s+/).filter(Boolean);
  return words.map((word) => queryTest(tensors, word));
}

function queryTest(tensors, word) {
  const comparison = COMPARISON.exec(word);
  if (comparison && Object.hasOwn(FILTER_METRICS, comparison[1])) return numberTest(tensors, comparison);
  if (word.length > 1 && word.startsWith("!")) {
    const test = nameTest(tensors, word.slice(1));
    return (row) => !test(row);
  }
  return nameTest(tensors, word);
}

function numberTest(tensors, [, name, relation, bound]) {
  const values = tensors.metric(FILTER_METRICS[name]);
  const holds = RELATIONS[relation];
  return (row) => holds(values[row], Number(bound));
}

function nameTest(tensors, word) {
  const names = tensors.lowerNames;
  if (!word.includes("*")) return (row) => names[row].includes(word);
  const parts = word.split("*").map((part) => part.replace(/[\\^$.|?+()[\]{}]/g, "\\$&"));
  const pattern = new RegExp(parts.join(".*"), "su");
  return (row) => pattern.test(names[row]);
}

/** Rows in the order that `sort` says: a column's key, `-` in front for the largest first. */
function sorted(rows, tensors, sort) {
  const isDescending = sort.startsWith("-");
  const key = sort.replace(/^-/, "");
  if (key === "name") return isDescending ? rows.reverse() : rows;
  const values = sortValues(tensors, key);
  if (values === null) return rows;
  const sign = isDescending ? -1 : 1;
  return rows.sort((one, other) => sign * order(values[one], values[other]) || one - other);
}

function order(one, other) {
  if (one < other) return -1;
  return one > other ? 1 : 0;
}

function sortValues(tensors, key) {
  if (key === "verdict")
    return tensors.once("sort verdict", () => tensors.names.map((_, row) => tensors.verdict(row)));
  if (key === "dtype")
    return tensors.once("sort dtype", () => tensors.names.map((_, row) => tensors.dtypes(row).join()));
  if (key === "worst" || !COLUMNS.some((column) => column.key === key)) return null;
  return tensors.once(`sort ${key}`, () =>
    tensors.metric(key).map((value, row) => sortNumber(tensors, value, row)),
  );
}

/** What has no distance and does not pass is worse than any distance; what has none and passes is better. */
function sortNumber(tensors, value, row) {
  if (!Number.isNaN(value)) return value;
  return tensors.passes(row) ? -Infinity : Infinity;
}
