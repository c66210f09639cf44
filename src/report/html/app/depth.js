// The map of layers and modules, and the curves by depth below it.

const ROW_HEIGHT = 18;
const CURVE_HEIGHT = 104;
const WIDEST_CELL = 26;
const NARROWEST_CELL = 5;

/** More rows and columns than these are cut, saying so. */
const MOST_ROWS = 80;
const MOST_LAYERS = 2000;

/** What the map can show: key, title, and the words for it in a sentence. */
const MEASURES = [
  ["rel_l2", "rel_l2"],
  ["one_minus_cos", "1 − cos"],
  ["max_abs", "max_abs"],
  ["share", "share of elements that differ"],
];

const CURVES = [
  ["rel_l2", "rel_l2"],
  ["one_minus_cos", "1 − cos"],
];

/** From the best to the worst; of a cell's tensors the worst is shown. */
const KINDS = ["absent", "equal", "number", "alone", "undefined"];

const ABSENT = { kind: "absent", value: NaN, row: null, count: 0 };

/** The maps of a report, one for each list of layers, and what is outside of all. */
class Depth {
  constructor(tensors, view) {
    this.tensors = tensors;
    this.view = view;
    this.states = statesOf(tensors);
    this.section = byId("depth");
    this.section.hidden = false;
    this.controls();
    view.onChange((changed) => this.changed(changed));
    DARK.addEventListener("change", () => this.show());
    new ResizeObserver(() => this.resized()).observe(this.section.querySelector(".maps"));
    this.show();
  }

  get state() {
    const wanted = this.view.get("state");
    return this.states.includes(wanted) ? wanted : this.states[0];
  }

  get measure() {
    const wanted = this.view.get("measure");
    return MEASURES.some(([key]) => key === wanted) ? wanted : MEASURES[0][0];
  }

  changed(names) {
    if (names.includes("state") || names.includes("measure")) this.show();
    else if (names.includes("cell")) this.maps.forEach((map) => map.paint());
  }

  /** Selects for the measure and, where an optimizer's tensors are there, for the kind of state. */
  controls() {
    const states = this.states.map((state) => [state, state === "" ? "weights" : state]);
    const selects = [choice("Measure", MEASURES, this.measure, (measure) => this.view.set({ measure }))];
    if (states.length > 1) {
      selects.push(choice("Tensors", states, this.state, (state) => this.view.set({ state, cell: null })));
    }
    this.selects = selects.map((label) => label.querySelector("select"));
    this.section.querySelector(".controls").replaceChildren(...selects);
  }

  show() {
    this.selects[0].value = this.measure;
    if (this.selects[1]) this.selects[1].value = this.state;
    const values = this.tensors.metric(this.measure);
    this.groups = groupsOf(this.tensors, this.state).map((group) => ({
      ...group,
      rows: rowsOf(group, this.tensors, values),
    }));
    const numbers = this.groups.flatMap(({ rows }) =>
      rows.flatMap(({ cells }) => cells.map(({ value }) => value)),
    );
    this.scale = new LogScale(numbers);
    this.draw();
  }

  draw() {
    fitLabels(this.groups);
    const title = MEASURES.find(([key]) => key === this.measure)[1];
    this.section.querySelector(".legend").replaceChildren(...legend(this.scale, title));
    const place = this.section.querySelector(".maps");
    this.width = place.clientWidth;
    this.maps = this.groups.map((group) => new DepthMap(this, group, this.width));
    place.replaceChildren(...this.maps.map((map) => map.element));
  }

  /** Draws again where the width is another one. */
  resized() {
    if (Math.abs(this.section.querySelector(".maps").clientWidth - this.width) > 8) this.draw();
  }

  read(text) {
    this.section.querySelector(".readout").textContent = text;
  }
}

/** The kinds of an optimizer's state that are there, weights first. */
function statesOf(tensors) {
  return [...new Set(tensors.columns.place.state.of)]
    .map((word) => tensors.columns.place.state.words[word])
    .sort();
}

function choice(title, options, value, choose) {
  const items = options.map(([key, text]) => make("option", { value: key, selected: key === value }, text));
  const select = make("select", { change: (event) => choose(event.target.value) }, items);
  return make("label", {}, make("span", {}, title), select);
}

/** The tensors of a state by list of layers, module and layer. */
function groupsOf(tensors, state) {
  const groups = new Map();
  for (let row = 0; row < tensors.count; row += 1) {
    const place = tensors.place(row);
    if (place.state === state) addTo(groups, place, row);
  }
  return [...groups.values()].map(finished).sort((one, other) => (one.list === "") - (other.list === ""));
}

function addTo(groups, { list, layer, module, parameter, expert }, row) {
  const group = entry(groups, list, () => ({ list, layers: new Set(), modules: new Map() }));
  group.layers.add(layer);
  const rows = entry(group.modules, module, () => ({
    title: module || parameter,
    byLayer: new Map(),
    hasExperts: false,
  }));
  rows.hasExperts ||= expert !== null;
  entry(rows.byLayer, layer, () => []).push(row);
}

function entry(map, key, initial) {
  if (!map.has(key)) map.set(key, initial());
  return map.get(key);
}

function finished({ list, layers, modules }) {
  const sortedLayers = [...layers].sort((one, other) => one - other);
  return { list, modules, layers: sortedLayers.slice(0, MOST_LAYERS), allLayers: sortedLayers.length };
}

/** The rows of a map: one for a module, two where it has experts. */
function rowsOf({ modules, layers }, tensors, values) {
  const rows = [];
  for (const [module, { title, byLayer, hasExperts }] of modules) {
    for (const fold of hasExperts ? ["worst", "median"] : [""]) {
      const cells = layers.map((layer) => foldedCell(tensors, values, byLayer.get(layer), fold));
      rows.push({ module, title: fold === "" ? title : `${title}, ${fold}`, cells });
    }
  }
  return rows.length <= MOST_ROWS ? rows : worstRows(rows);
}

/** The rows with the worst cells, in the order in which they were. */
function worstRows(rows) {
  const worst = new Map(rows.map((row) => [row, row.cells.reduce(worseCell, ABSENT)]));
  const kept = [...rows]
    .sort((one, other) => compareCells(worst.get(other), worst.get(one)))
    .slice(0, MOST_ROWS);
  return rows.filter((row) => kept.includes(row));
}

function foldedCell(tensors, values, rows, fold) {
  if (rows === undefined) return ABSENT;
  return fold === "median" ? medianCell(tensors, values, rows) : worstCell(tensors, values, rows);
}

/** The tensor in the middle; between two, the mean of their numbers. */
function medianCell(tensors, values, rows) {
  const cells = rows.map((row) => cellOf(tensors, values, row)).sort(compareCells);
  const middle = cells[Math.floor(cells.length / 2)];
  const before = cells[Math.ceil(cells.length / 2) - 1];
  const value = middle.kind === "number" ? (middle.value + (before.value || 0)) / 2 : middle.value;
  return { ...middle, value, count: rows.length, isMedian: true };
}

function worstCell(tensors, values, rows) {
  const cell = rows.map((row) => cellOf(tensors, values, row)).reduce(worseCell, ABSENT);
  return { ...cell, count: rows.length };
}

function cellOf(tensors, values, row) {
  const value = values[row];
  return { kind: kindOf(tensors, value, row), value, row };
}

function kindOf(tensors, value, row) {
  if (!tensors.isPair(row)) return tensors.isOnOneSide(row) ? "alone" : "absent";
  if (Number.isNaN(value)) return "undefined";
  return value === 0 ? "equal" : "number";
}

function worseCell(one, other) {
  return compareCells(one, other) >= 0 ? one : other;
}

function compareCells(one, other) {
  return (
    KINDS.indexOf(one.kind) - KINDS.indexOf(other.kind) ||
    (one.kind === "number" ? one.value - other.value : 0)
  );
}

/** The map of one list of layers with its curves. */
class DepthMap {
  constructor(depth, group, width) {
    this.depth = depth;
    this.group = group;
    this.cursor = { row: 0, column: 0 };
    this.element = make("figure", { class: "map" }, make("figcaption", {}, this.caption()));
    const grid = make("div", { class: "map-grid" });
    this.element.append(grid);
    const labels = make("div", { class: "map-labels" }, this.labels());
    grid.append(labels);
    this.cellWidth = this.fittingWidth(width - labelWidth());
    this.canvas = this.makeCanvas();
    const scroller = make("div", { class: "scroll" }, this.canvas, this.axis(), this.curves(labels));
    grid.append(scroller);
    this.paint();
  }

  get columns() {
    return this.group.layers.length;
  }

  get isLayered() {
    return this.group.list !== "";
  }

  caption() {
    const { list, modules, rows, allLayers } = this.group;
    if (!this.isLayered) return `outside of the layers: ${counted(modules.size, "module")}`;
    const cut = allLayers > this.columns ? `, of which the first ${grouped(this.columns)}` : "";
    const left = rows.length >= MOST_ROWS ? `; the ${MOST_ROWS} worst rows` : "";
    return `${list}: ${counted(allLayers, "layer")}${cut}${left}`;
  }

  labels() {
    return this.group.rows.map(({ title }) =>
      make("div", { class: "map-label", title }, make("bdi", {}, shortened(title, 60))),
    );
  }

  fittingWidth(width) {
    return clamp(Math.floor(width / this.columns), NARROWEST_CELL, WIDEST_CELL);
  }

  makeCanvas() {
    const label = `Map of ${this.caption()}. Rows are modules, columns are layers. Arrow keys move, Enter lists the tensors.`;
    return make("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label": label,
      pointermove: (event) => this.pointed(event),
      pointerleave: () => this.depth.read(""),
      click: (event) => this.clicked(event),
      keydown: (event) => this.pressed(event),
      focus: () => this.focused(),
      blur: () => this.paint(),
    });
  }

  /** Draws all cells, the selected one and, with the focus, the cursor. */
  paint() {
    const { rows } = this.group;
    const context = sharpCanvas(this.canvas, this.columns * this.cellWidth, rows.length * ROW_HEIGHT);
    const gap = this.cellWidth > 8 ? 1 : 0;
    rows.forEach(({ cells }, row) => {
      cells.forEach((cell, column) => {
        const [x, y] = [column * this.cellWidth, row * ROW_HEIGHT];
        drawCell(context, x, y, this.cellWidth - gap, ROW_HEIGHT - 1, cell, this.depth.scale);
      });
    });
    const chosen = this.chosen();
    rows.forEach(({ module }, row) => {
      if (chosen && module === chosen.module) this.frame(context, row, chosen.column, "ink");
    });
    if (document.activeElement === this.canvas)
      this.frame(context, this.cursor.row, this.cursor.column, "focus");
  }

  /** The cell that the view has chosen, where it is of this map. */
  chosen() {
    const cell = this.depth.view.get("cell");
    if (cell === null || cell[0] !== this.depth.state || cell[1] !== this.group.list) return null;
    const column = this.group.layers.indexOf(cell[2]);
    return column < 0 ? null : { module: cell[3], column };
  }

  frame(context, row, column, color) {
    context.strokeStyle = ink(color);
    context.lineWidth = 2;
    context.strokeRect(column * this.cellWidth + 1, row * ROW_HEIGHT + 1, this.cellWidth - 2, ROW_HEIGHT - 3);
  }

  /** The cell at a place of the page. */
  at(event) {
    const row = Math.floor(event.offsetY / ROW_HEIGHT);
    const column = Math.floor(event.offsetX / this.cellWidth);
    return this.group.rows[row]?.cells[column] ? { row, column } : null;
  }

  pointed(event) {
    const at = this.at(event);
    this.depth.read(at ? this.description(at) : "");
  }

  clicked(event) {
    const at = this.at(event);
    if (!at) return;
    this.cursor = at;
    this.choose();
  }

  focused() {
    this.paint();
    this.depth.read(this.description(this.cursor));
  }

  pressed(event) {
    const { row, column } = this.cursor;
    const moves = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, this.columns - 1],
    };
    if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key in moves) this.move(...moves[event.key]);
    else return;
    event.preventDefault();
  }

  move(row, column) {
    this.cursor = {
      row: clamp(row, 0, this.group.rows.length - 1),
      column: clamp(column, 0, this.columns - 1),
    };
    this.focused();
    const scroller = this.canvas.parentElement;
    const x = this.cursor.column * this.cellWidth;
    scroller.scrollLeft = clamp(scroller.scrollLeft, x + this.cellWidth - scroller.clientWidth, x);
  }

  /** Lists the tensors of the cell under the cursor. */
  choose() {
    const { module, cells } = this.group.rows[this.cursor.row];
    if (cells[this.cursor.column].row === null) return;
    const layer = this.group.layers[this.cursor.column];
    this.depth.view.set({
      cell: [this.depth.state, this.group.list, layer, module],
      q: "",
      verdict: "",
      row: null,
    });
    byId("chosen").scrollIntoView({ block: "start" });
  }

  description({ row, column }) {
    const { title, cells } = this.group.rows[row];
    const cell = cells[column];
    const layer = this.isLayered ? `layer ${this.group.layers[column]}, ` : "";
    return `${layer}${shortened(title, 80)}: ${this.cellText(cell)}`;
  }

  cellText(cell) {
    if (cell.row === null) return "no such tensor";
    const { tensors, measure } = this.depth;
    const texts = {
      equal: () => `${measure} 0`,
      number: () => `${measure} ${measure === "share" ? percent(cell.value, 1) : scientific(cell.value)}`,
      alone: () => tensors.verdict(cell.row),
      undefined: () => `${measure} is not defined`,
      absent: () => tensors.verdict(cell.row),
    };
    if (cell.isMedian) return `${texts[cell.kind]()}, the median of ${counted(cell.count, "tensor")}`;
    const of = cell.count > 1 ? `, the worst of ${counted(cell.count, "tensor")}` : "";
    return `${texts[cell.kind]()}${of}: ${shortened(tensors.name(cell.row), 120)}`;
  }

  /** The numbers of layers below the map. */
  axis() {
    if (!this.isLayered) return null;
    const width = this.columns * this.cellWidth;
    const axis = draw("svg", { class: "axis", width, height: 16, "aria-hidden": "true" });
    const step = axisStep(this.group.layers.length, this.cellWidth);
    for (let column = 0; column < this.columns; column += step) {
      const x = (column + 0.5) * this.cellWidth;
      const anchor = x < 8 ? "start" : x > width - 8 ? "end" : "middle";
      axis.append(
        draw(
          "text",
          { x: anchor === "start" ? 0 : x, y: 12, "text-anchor": anchor },
          String(this.group.layers[column]),
        ),
      );
    }
    return axis;
  }

  /** Curves by depth in line with the columns, with their scales among the labels. */
  curves(labels) {
    if (this.columns < 2) return [];
    labels.append(make("div", { class: "axis-label" }, "layer"));
    return CURVES.map(([key, title]) => {
      const series = this.series(key);
      const scale = new LogScale(series.flatMap(({ values }) => values));
      labels.append(curveScale(scale, title));
      return this.curve(series, scale, title);
    });
  }

  /** The worst and the median tensor of each layer. */
  series(key) {
    const values = this.depth.tensors.metric(key);
    const ofLayer = (layer) => {
      const rows = [...this.group.modules.values()].flatMap(({ byLayer }) => byLayer.get(layer) ?? []);
      return rows
        .map((row) => values[row])
        .filter((value) => !Number.isNaN(value))
        .sort((one, other) => one - other);
    };
    const layers = this.group.layers.map(ofLayer);
    return [
      { name: "worst", values: layers.map((own) => own.at(-1) ?? NaN) },
      { name: "median", values: layers.map((own) => own[Math.floor(own.length / 2)] ?? NaN) },
    ];
  }

  curve(series, scale, title) {
    const width = this.columns * this.cellWidth;
    const label = `${title} by depth: worst and median tensor of each layer`;
    const svg = draw("svg", {
      class: "curve",
      width,
      height: CURVE_HEIGHT,
      role: "img",
      "aria-label": label,
    });
    for (const power of scale.isEmpty ? [] : scale.ticks(4)) {
      const y = curveY(scale, 10 ** power);
      svg.append(draw("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }));
    }
    for (const { name, values } of series) this.drawSeries(svg, scale, name, values);
    return svg;
  }

  drawSeries(svg, scale, name, values) {
    const points = values.map((value, column) => [
      (column + 0.5) * this.cellWidth,
      curveY(scale, value),
      value,
    ]);
    svg.append(draw("path", { class: `line ${name}`, d: pathOf(points) }));
    points.forEach(([x, y, value], column) => {
      if (Number.isNaN(value)) return;
      const title = draw("title", {}, `layer ${this.group.layers[column]}, ${name}: ${scientific(value)}`);
      svg.append(draw("circle", { class: `dot ${name}`, cx: x, cy: y, r: 1.8 }, title));
    });
  }
}

/** Makes room for the longest label, as far as there is some. */
function fitLabels(groups) {
  const longest = Math.max(...groups.flatMap(({ rows }) => rows.map(({ title }) => title.length)));
  const width = clamp(longest * 0.5 + 1, 9.5, document.body.clientWidth < 700 ? 9.5 : 26);
  document.documentElement.style.setProperty("--label-width", `${width}rem`);
}

function labelWidth() {
  return parseFloat(ink("label-width")) * parseFloat(getComputedStyle(document.documentElement).fontSize);
}

/** Layers from one number below the map to the next. */
function axisStep(count, cellWidth) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  return steps.find((step) => step * cellWidth >= 28) ?? count;
}

/** Zero is at the bottom, below the smallest number. */
function curveY(scale, value) {
  const [top, bottom] = [8, CURVE_HEIGHT - 26];
  if (!(value > 0) || scale.isEmpty) return CURVE_HEIGHT - 8;
  return bottom - scale.place(value) * (bottom - top);
}

/** A line through points, with gaps where there is no number. */
function pathOf(points) {
  let isPenDown = false;
  const steps = points.map(([x, y, value]) => {
    const step = Number.isNaN(value) ? "" : `${isPenDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isPenDown = !Number.isNaN(value);
    return step;
  });
  return steps.join("");
}

/** The title and the scale of a curve, among the labels of the map. */
function curveScale(scale, title) {
  const box = make("div", { class: "curve-scale" }, make("span", { class: "title" }, title), curveKey());
  for (const power of scale.isEmpty ? [] : scale.ticks(4))
    box.append(curveTick(`1e${power}`, curveY(scale, 10 ** power)));
  box.append(curveTick("0", CURVE_HEIGHT - 8));
  return box;
}

function curveKey() {
  return make(
    "span",
    { class: "key" },
    ["worst", "median"].map((name) => make("span", { class: name }, name)),
  );
}

function curveTick(text, y) {
  const tick = make("span", { class: "tick" }, text);
  tick.style.top = `${y}px`;
  return tick;
}
