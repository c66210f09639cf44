// The data of the page, and the tensors in it by row and column.

async function readData() {
  const text = byId("data").textContent;
  const stream = new Blob([decoded(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** The bytes that a base64 text stands for. */
function decoded(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let at = 0; at < characters.length; at += 1) bytes[at] = characters.charCodeAt(at);
  return bytes;
}

/** Every name of both sides in natural order, with what is known of it. */
class Tensors {
  constructor(columns) {
    this.columns = columns;
    this.count = columns.count;
    this.names = unfolded(columns.name);
    this.computed = new Map();
  }

  name(row) {
    return this.names[row];
  }

  /** Names as a filter reads them. */
  get lowerNames() {
    return this.once("lower names", () => this.names.map((name) => name.toLowerCase()));
  }

  rowOf(name) {
    const rows = this.once("rows", () => new Map(this.names.map((text, row) => [text, row])));
    return rows.get(name) ?? null;
  }

  verdict(row) {
    return wordOf(this.columns.verdict, row);
  }

  passes(row) {
    return this.columns.passes[row] === 1;
  }

  /** It is on both sides, and to be compared. */
  isPair(row) {
    return this.columns.numel[row] !== null;
  }

  isOnOneSide(row) {
    return this.verdict(row).startsWith("only in");
  }

  dtypes(row) {
    return this.columns.dtype.map((words) => wordOf(words, row));
  }

  shapes(row) {
    return this.columns.shape.map((words) => wordOf(words, row));
  }

  place(row) {
    const { state, list, layer, module, expert, parameter } = this.columns.place;
    return {
      state: wordOf(state, row),
      list: wordOf(list, row),
      layer: layer[row],
      module: wordOf(module, row),
      expert: expert[row],
      parameter: wordOf(parameter, row),
    };
  }

  more(row) {
    return this.columns.more[row] ?? null;
  }

  worst(row) {
    const { index, a, b } = this.columns.worst;
    return index[row] === null ? null : { index: `[${index[row].join(", ")}]`, a: a[row], b: b[row] };
  }

  numel(row) {
    return this.columns.numel[row];
  }

  count_(name, row) {
    return this.columns.counts[name][row];
  }

  notFinite(row) {
    return ["nan_a", "nan_b", "inf_a", "inf_b"].map((name) => this.count_(name, row) ?? 0);
  }

  /** The numbers of a metric by row; NaN where it is not defined. */
  metric(name) {
    return this.once(name, () => this.computedMetric(name));
  }

  computedMetric(name) {
    const { distances, counts, numel } = this.columns;
    if (name === "share")
      return Float64Array.from(counts.differing, (count, row) => ratio(count, numel[row]));
    if (name in distances) return unrounded(distances[name]);
    const exact = name in counts ? counts[name] : (this.columns.place[name] ?? this.columns[name]);
    return Float64Array.from(exact, (value) => value ?? NaN);
  }

  /** The value of a function that is called once. */
  once(key, compute) {
    if (!this.computed.has(key)) this.computed.set(key, compute());
    return this.computed.get(key);
  }
}

function ratio(part, whole) {
  if (part === null || part === undefined || whole === null) return NaN;
  return whole === 0 ? 0 : part / whole;
}

function wordOf({ words, of }, row) {
  return words[of[row]];
}

function unfolded({ shared, rest }) {
  let before = "";
  return rest.map((text, row) => {
    before = before.slice(0, shared[row]) + text;
    return before;
  });
}

function unrounded({ digits, exponent }) {
  return Float64Array.from(digits, (value, row) =>
    value === null ? NaN : Number(`${value}e${exponent[row]}`),
  );
}
