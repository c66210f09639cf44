// The table of all names: only the rows in sight are elements.

const LINE_HEIGHT = 24;
const ROWS_AHEAD = 6;

/** Rows of the table on paper. */
const PRINTED_ROWS = 200;

/** Longest name in a row, on a narrow screen too; the details have all of it. */
const NAME_LENGTH = innerWidth < 700 ? 28 : 76;

/** The columns: key of the order, title, width, text of a row; `when` says whether it is there. */
const COLUMNS = [
  {
    key: "name",
    title: "tensor",
    fit: "name",
    text: (tensors, row) => shortened(tensors.name(row), NAME_LENGTH),
  },
  { key: "verdict", title: "verdict", width: "6.5rem", text: (tensors, row) => tensors.verdict(row) },
  numberColumn("rel_l2", "rel_l2"),
  numberColumn("one_minus_cos", "1 − cos"),
  numberColumn("l2", "l2"),
  numberColumn("max_abs", "max_abs"),
  {
    ...numberColumn("max_ulp", "max_ulp"),
    when: (tensors) => tensors.metric("max_ulp").some((ulp) => ulp > 0),
  },
  { key: "differing", title: "differing", width: "6.5rem", isNumber: true, text: differingText },
  { key: "share", title: "share", width: "5rem", isNumber: true, text: shareText },
  { key: "nan", title: "NaN, Inf", width: "7rem", isNumber: true, text: notFiniteText, when: hasNotFinite },
  { key: "worst", title: "worst at", fit: "index", isNumber: true, isFixed: true, text: worstText("index") },
  { key: "worst", title: "in a", fit: "a", isNumber: true, isFixed: true, text: worstText("a") },
  { key: "worst", title: "in b", fit: "b", isNumber: true, isFixed: true, text: worstText("b") },
  { key: "dtype", title: "dtype", fit: "dtype", text: (tensors, row) => both(tensors.dtypes(row)) },
  { key: "numel", title: "shape", fit: "shape", text: (tensors, row) => both(tensors.shapes(row)) },
];

function numberColumn(key, title) {
  return {
    key,
    title,
    width: "6rem",
    isNumber: true,
    text: (tensors, row) => scientific(tensors.metric(key)[row]),
  };
}

function differingText(tensors, row) {
  const count = tensors.count_("differing", row);
  return count === null ? NO_VALUE : grouped(count);
}

function shareText(tensors, row) {
  const count = tensors.count_("differing", row);
  return count === null ? NO_VALUE : percent(count, tensors.numel(row));
}

function hasNotFinite(tensors) {
  return ["nan_a", "nan_b", "inf_a", "inf_b"].some((name) =>
    tensors.columns.counts[name].some((count) => count > 0),
  );
}

function notFiniteText(tensors, row) {
  const [nanA, nanB, infA, infB] = tensors.notFinite(row);
  return nanA + nanB + infA + infB === 0 ? "" : `${nanA}|${nanB}, ${infA}|${infB}`;
}

function worstText(part) {
  return (tensors, row) => tensors.worst(row)?.[part] ?? "";
}

/** Widths in characters of the columns whose texts have any length. */
const FITTED = {
  name: (tensors) => [tensors.names, NAME_LENGTH],
  index: (tensors) => [
    tensors.columns.worst.index.map((index) => (index === null ? "" : index.join(", ") + "[]")),
    22,
  ],
  a: (tensors) => [tensors.columns.worst.a, 26],
  b: (tensors) => [tensors.columns.worst.b, 26],
  dtype: (tensors) => [pairsOfWords(tensors.columns.dtype), 24],
  shape: (tensors) => [pairsOfWords(tensors.columns.shape), 30],
};

/** All texts that `both` can make of words. */
function pairsOfWords([a, b]) {
  const differs = a.of.some((word, row) => a.words[word] !== b.words[b.of[row]]);
  return differs ? a.words.flatMap((one) => b.words.map((other) => `${one} | ${other}`)) : a.words;
}

function widthOf({ width, fit }, tensors) {
  if (fit === undefined) return width;
  const [texts, most] = FITTED[fit](tensors);
  let longest = 8;
  for (const text of texts) if (text !== null && text.length > longest) longest = text.length;
  const fixed = `calc(${Math.min(longest, most) * 0.535}rem + 1.4rem)`;
  return fit === "name" ? `minmax(${fixed}, 1fr)` : fixed;
}

/** One text where both sides agree. */
function both([a, b]) {
  return a === b ? a : `${a} | ${b}`;
}

class Table {
  constructor(tensors, view) {
    this.tensors = tensors;
    this.view = view;
    this.columns = COLUMNS.filter(({ when }) => when === undefined || when(tensors));
    this.lines = [];
    this.build();
    byId("tensors").hidden = false;
    view.onChange((changed) => this.changed(changed));
    new ResizeObserver(() => this.fill()).observe(this.grid);
    this.update();
  }

  build() {
    this.head = make(
      "div",
      { class: "line head", role: "row", "aria-rowindex": 1 },
      this.columns.map((column) => this.heading(column)),
    );
    this.space = make("div", { class: "space", role: "rowgroup" });
    this.grid = make(
      "div",
      {
        class: "grid",
        role: "grid",
        tabindex: 0,
        "aria-label": "Tensors; arrow keys move, the row's details are below",
        "aria-colcount": this.columns.length,
        scroll: () => this.scrolled(),
        keydown: (event) => this.pressed(event),
      },
      make("div", { role: "rowgroup", class: "heads" }, this.head),
      this.space,
    );
    this.grid.style.setProperty(
      "--columns",
      this.columns.map((column) => widthOf(column, this.tensors)).join(" "),
    );
    byId("table").replaceChildren(this.grid);
  }

  heading(column) {
    const attributes = { class: column.isNumber ? "number" : null, role: "columnheader" };
    if (column.isFixed) return make("span", attributes, column.title);
    const sort = () => this.sortBy(column);
    return make(
      "span",
      { ...attributes, "data-key": column.key },
      make("button", { type: "button", click: sort }, column.title),
    );
  }

  /** Sorts by a column; numbers begin with the largest, a second time turns the order around. */
  sortBy({ key, isNumber }) {
    const first = isNumber || key === "numel" ? `-${key}` : key;
    const second = first.startsWith("-") ? key : `-${key}`;
    this.view.set({ sort: this.view.get("sort") === first ? second : first });
  }

  changed(names) {
    if (names.some((name) => ["q", "verdict", "sort", "cell"].includes(name))) this.update();
    else if (names.includes("row")) this.mark();
  }

  /** Takes the rows of the view. */
  update() {
    this.rows = shownRows(this.tensors, this.view);
    this.grid.setAttribute("aria-rowcount", this.rows.length + 1);
    this.space.style.height = `${this.rows.length * LINE_HEIGHT}px`;
    this.showOrder();
    this.lines.forEach((line) => (line.dataset.at = ""));
    this.grid.scrollTop = 0;
    byId("shown").textContent = this.shownText();
    this.showSelected();
    this.fill();
  }

  shownText() {
    const of = this.rows.length === this.tensors.count ? "" : ` of ${grouped(this.tensors.count)}`;
    return `${grouped(this.rows.length)}${of} shown`;
  }

  showOrder() {
    const sort = this.view.get("sort");
    for (const heading of this.head.children) {
      const isSorted = heading.dataset.key === sort.replace(/^-/, "");
      const order = sort.startsWith("-") ? "descending" : "ascending";
      heading.setAttribute("aria-sort", isSorted ? order : "none");
    }
  }

  scrolled() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.fill();
    });
  }

  /** Puts the rows that are in sight into the elements for them. */
  fill() {
    const [first, last] = this.range();
    while (this.lines.length < last - first) this.lines.push(this.line());
    const pool = this.lines.length;
    for (let at = first; at < last; at += 1) {
      const line = this.lines[at % pool];
      if (line.dataset.at !== String(at)) this.put(line, at);
    }
    const isUsed = (line) => line.dataset.at !== "" && line.dataset.at >= first && line.dataset.at < last;
    for (const line of this.lines) line.hidden = !isUsed(line);
  }

  /** The first row that gets an element, and the one after the last. */
  range() {
    if (isPrinting) return [0, Math.min(PRINTED_ROWS, this.rows.length)];
    const first = Math.max(Math.floor(this.grid.scrollTop / LINE_HEIGHT) - ROWS_AHEAD, 0);
    const inSight = Math.ceil(this.grid.clientHeight / LINE_HEIGHT) + 2 * ROWS_AHEAD;
    return [first, Math.min(first + inSight, this.rows.length)];
  }

  line() {
    const cell = ({ isNumber }, at) =>
      make("span", { role: at === 0 ? "rowheader" : "gridcell", class: isNumber ? "number" : null }, "");
    const line = make(
      "div",
      { class: "line", role: "row", click: (event) => this.clicked(event) },
      this.columns.map(cell),
    );
    this.space.append(line);
    this.lines.forEach((other) => (other.dataset.at = ""));
    return line;
  }

  put(line, at) {
    const row = this.rows[at];
    line.dataset.at = at;
    line.id = `line-${at}`;
    line.setAttribute("aria-rowindex", at + 2);
    line.style.top = `${at * LINE_HEIGHT}px`;
    line.classList.toggle("fails", !this.tensors.passes(row));
    this.columns.forEach(({ text }, column) => (line.children[column].firstChild.data = text(this.tensors, row)));
    this.markLine(line, row);
  }

  markLine(line, row) {
    line.setAttribute("aria-selected", row === this.selected ? "true" : "false");
  }

  mark() {
    const name = this.view.get("row");
    this.selected = name === null ? null : this.tensors.rowOf(name);
    for (const line of this.lines)
      if (line.dataset.at !== "") this.markLine(line, this.rows[line.dataset.at]);
    const at = this.selected === null ? -1 : this.rows.indexOf(this.selected);
    if (at < 0) this.grid.removeAttribute("aria-activedescendant");
    else this.grid.setAttribute("aria-activedescendant", `line-${at}`);
    return at;
  }

  /** Marks the selected row and brings it into sight. */
  showSelected() {
    const at = this.mark();
    if (at >= 0) this.reveal(at);
  }

  reveal(at) {
    const top = at * LINE_HEIGHT;
    const height = this.grid.clientHeight - this.head.offsetHeight;
    this.grid.scrollTop = clamp(this.grid.scrollTop, top + LINE_HEIGHT - height, top);
    this.fill();
  }

  clicked(event) {
    this.select(Number(event.currentTarget.dataset.at));
  }

  select(at) {
    if (this.rows.length === 0) return;
    const to = clamp(at, 0, this.rows.length - 1);
    this.reveal(to);
    this.view.set({ row: this.tensors.name(this.rows[to]) });
  }

  pressed(event) {
    if (event.target !== this.grid) return;
    if (event.key === "Escape") this.view.set({ row: null });
    else if (event.key in this.moves()) this.select(this.moves()[event.key]);
    else return;
    event.preventDefault();
  }

  /** Where keys lead to. */
  moves() {
    const at = this.selected === null ? -1 : this.rows.indexOf(this.selected);
    const page = Math.max(Math.floor(this.grid.clientHeight / LINE_HEIGHT) - 2, 1);
    return {
      ArrowDown: at + 1,
      ArrowUp: at < 0 ? 0 : at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: this.rows.length - 1,
    };
  }

  /** Shows the first rows in full for paper. */
  printed() {
    this.space.style.height = `${Math.min(isPrinting ? PRINTED_ROWS : Infinity, this.rows.length) * LINE_HEIGHT}px`;
    this.lines.forEach((line) => (line.dataset.at = ""));
    this.fill();
  }
}

/** Filter, verdict and the chosen cell above the table. */
class Filters {
  constructor(tensors, view) {
    this.view = view;
    this.query = byId("filter");
    this.verdict = byId("verdict");
    this.verdict.replaceChildren(...verdictOptions(tensors));
    this.query.addEventListener("input", () => view.set({ q: this.query.value }));
    this.verdict.addEventListener("change", () => view.set({ verdict: this.verdict.value }));
    byId("clear").addEventListener("click", () => view.set({ q: "", verdict: "", cell: null, row: null }));
    view.onChange(() => this.show());
    this.show();
  }

  show() {
    if (this.query.value !== this.view.get("q")) this.query.value = this.view.get("q");
    this.verdict.value = this.view.get("verdict");
    this.showCell(this.view.get("cell"));
  }

  showCell(cell) {
    const chosen = byId("chosen");
    chosen.hidden = cell === null;
    if (cell === null) return;
    const drop = make("button", { type: "button", click: () => this.view.set({ cell: null }) }, "show all");
    const back = make(
      "button",
      { type: "button", click: () => byId("depth").scrollIntoView() },
      "back to the map",
    );
    chosen.replaceChildren("Tensors of ", make("strong", {}, cellName(cell)), " ", drop, " ", back);
  }
}

function cellName([state, list, layer, module]) {
  const parts = [state, list, layer === null ? "" : `layer ${layer}`, shortened(module, 80)];
  return parts.filter((part) => part !== "").join(", ");
}

function verdictOptions(tensors) {
  const counts = new Map();
  let failing = 0;
  for (let row = 0; row < tensors.count; row += 1) {
    const verdict = tensors.verdict(row);
    counts.set(verdict, (counts.get(verdict) ?? 0) + 1);
    if (!tensors.passes(row)) failing += 1;
  }
  const option = (value, text, count) => make("option", { value }, `${text} (${grouped(count)})`);
  const verdicts = [...counts].map(([verdict, count]) => option(verdict, verdict, count));
  return [option("", "all", tensors.count), option("failing", "do not pass", failing), ...verdicts];
}
