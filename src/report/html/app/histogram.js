// How many tensors and elements differ by how much.

function showHistograms(tensors, view) {
  const parts = [tensorHistogram(tensors, view), elementHistogram(tensors.columns.powers)];
  if (parts.some(isContent)) show("histogram", parts);
}

/** Tensors by the power of ten of their relative distance, each a button that lists them. */
function tensorHistogram(tensors, view) {
  const bins = tensorBins(tensors);
  if (bins.length === 0) return null;
  const most = Math.max(...bins.map(({ count }) => count));
  const rows = bins.map((bin) => binRow(bin, most, view));
  return make("div", {}, make("h3", {}, "Tensors by rel_l2"), make("div", { class: "bars" }, rows));
}

function tensorBins(tensors) {
  const values = tensors.metric("rel_l2");
  const counts = new Map();
  const add = (key) => counts.set(key, (counts.get(key) ?? 0) + 1);
  values.forEach((value, row) => {
    if (!tensors.isPair(row)) return;
    if (Number.isNaN(value)) add("none");
    else add(value === 0 ? "zero" : Math.floor(Math.log10(value)));
  });
  const powers = [...counts.keys()].filter(Number.isInteger).sort((one, other) => one - other);
  const bins = [];
  if (counts.has("zero")) bins.push({ text: "0", q: "rel_l2=0", count: counts.get("zero") });
  if (powers.length > 0) bins.push(...decades(powers[0], powers.at(-1), counts));
  if (counts.has("none")) bins.push({ text: "not defined", q: null, count: counts.get("none") });
  return bins;
}

function decades(first, last, counts) {
  const bins = [];
  for (let power = first; power <= last; power += 1) {
    const text = `1e${power} to 1e${power + 1}`;
    bins.push({ text, q: `rel_l2>=1e${power} rel_l2<1e${power + 1}`, count: counts.get(power) ?? 0 });
  }
  return bins;
}

function binRow({ text, q, count }, most, view) {
  const bar = make("span", { class: "bar" });
  bar.style.width = `${(100 * count) / most}%`;
  const parts = [
    make("span", { class: "bin" }, text),
    make("span", { class: "number" }, grouped(count)),
    make("span", { class: "track", "aria-hidden": "true" }, bar),
  ];
  if (q === null) return make("div", { class: "bar-row" }, parts);
  const list = () => {
    view.set({ q, verdict: "", cell: null, row: null });
    byId("tensors").scrollIntoView({ block: "start" });
  };
  return make(
    "button",
    { type: "button", class: "bar-row", click: list, title: "list these tensors" },
    parts,
  );
}

/** Elements by the power of two below their difference, as columns whose heights are logarithms. */
function elementHistogram(powers) {
  const bins = Object.entries(powers).map(([power, count]) => [Number(power), count]);
  if (bins.length === 0) return null;
  bins.sort(([one], [other]) => one - other);
  const total = bins.reduce((sum, [, count]) => sum + count, 0);
  return make(
    "div",
    {},
    make("h3", {}, "Elements by |a − b|"),
    elementColumns(bins),
    make(
      "p",
      { class: "hint" },
      `${counted(total, "element")} that differ, by powers of two; heights are logarithms`,
    ),
  );
}

const COLUMNS_SIZE = { width: 500, height: 150, left: 84, right: 18, bottom: 22 };

function elementColumns(bins) {
  const { width, height, left, right, bottom } = COLUMNS_SIZE;
  const [first, last] = [bins[0][0], bins.at(-1)[0]];
  const most = Math.max(...bins.map(([, count]) => count));
  const step = Math.min((width - left - right) / (last - first + 1), 24);
  const x = (power) => left + (power - first) * step;
  const y = (count) => (height - bottom) * (1 - Math.log10(count + 1) / Math.log10(most + 1)) + 4;
  const svg = draw("svg", { class: "histogram", viewBox: `0 0 ${width} ${height + 6}`, role: "img" });
  svg.setAttribute("aria-label", `elements by difference, from 2^${first} to 2^${last + 1}`);
  for (const [power, count] of bins) {
    const title = draw("title", {}, `2^${power} to 2^${power + 1}: ${counted(count, "element")}`);
    const bar = {
      class: "bar",
      x: x(power),
      y: y(count),
      width: Math.max(step - 0.7, 0.5),
      height: height - bottom + 4 - y(count),
    };
    svg.append(draw("rect", bar, title));
  }
  svg.append(...columnTicks(first, last, x, step), ...countTicks(most, y));
  return svg;
}

/** Differences below the columns, as powers of ten. */
function columnTicks(first, last, x, step) {
  const ticks = [];
  const lowest = Math.ceil(first * Math.log10(2));
  const highest = Math.floor((last + 1) * Math.log10(2));
  const every = Math.max(1, Math.ceil((highest - lowest) / 8));
  for (let power = lowest; power <= highest; power += every) {
    const at = x(power / Math.log10(2));
    ticks.push(draw("text", { x: at, y: COLUMNS_SIZE.height, "text-anchor": "middle" }, `1e${power}`));
    ticks.push(
      draw("line", {
        class: "grid",
        x1: at,
        x2: at,
        y1: COLUMNS_SIZE.height - 18,
        y2: COLUMNS_SIZE.height - 13,
      }),
    );
  }
  if (ticks.length === 0) ticks.push(draw("text", { x: x(first), y: COLUMNS_SIZE.height }, `2^${first}`));
  return ticks;
}

/** Counts beside the columns. */
function countTicks(most, y) {
  const ticks = [];
  const highest = Math.floor(Math.log10(most));
  const every = Math.max(1, Math.ceil(highest / 4));
  for (let power = 0; power <= highest; power += every) {
    const at = { x: COLUMNS_SIZE.left - 6, y: y(10 ** power) + 4, "text-anchor": "end" };
    ticks.push(draw("text", at, grouped(10 ** power)));
  }
  return ticks;
}
