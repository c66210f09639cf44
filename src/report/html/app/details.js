// Everything about the selected tensor.

function showDetails(tensors, view) {
  const place = byId("details");
  const show = () => {
    const name = view.get("row");
    const row = name === null ? null : tensors.rowOf(name);
    place.replaceChildren(...(row === null ? [] : details(tensors, row)));
  };
  view.onChange((changed) => changed.includes("row") && show());
  show();
}

function details(tensors, row) {
  const facts = [...detailFacts(tensors, row), ...moreFacts(tensors.more(row))];
  const list = facts.filter(([, text]) => text !== null && text !== "");
  const entry = ([title, text]) => [make("dt", {}, title), make("dd", {}, text)];
  const copies = tensors.more(row)?.replicas ?? [];
  return [
    make("h3", { class: "name" }, tensors.name(row)),
    make("dl", { class: "detail-list" }, list.flatMap(entry)),
    copies.length > 0 ? replicaTable(copies.map((copy) => [null, copy])) : null,
  ].filter(isContent);
}

function detailFacts(tensors, row) {
  const verdict = `${tensors.verdict(row)}${tensors.passes(row) ? "" : ", does not pass"}`;
  if (!tensors.isPair(row)) return [["verdict", verdict]];
  const number = (key) => scientific(tensors.metric(key)[row]);
  const worst = tensors.worst(row);
  const [nanA, nanB, infA, infB] = tensors.notFinite(row);
  return [
    ["verdict", verdict],
    ["rel_l2", number("rel_l2")],
    ["1 − cos", number("one_minus_cos")],
    ["l2", number("l2")],
    ["max_abs", number("max_abs")],
    ["max_ulp", number("max_ulp")],
    ["norms", `${number("norm_a")} in a, ${number("norm_b")} in b`],
    ["differing", `${differingText(tensors, row)} of ${grouped(tensors.numel(row))} elements`],
    ["worst element", worst && `at ${worst.index}: ${worst.a} in a, ${worst.b} in b`],
    [
      "not finite",
      nanA + nanB + infA + infB === 0
        ? null
        : `NaN ${nanA} in a, ${nanB} in b; Inf ${infA} in a, ${infB} in b`,
    ],
    ["dtype", sidesText(tensors.dtypes(row))],
    ["shape", sidesText(tensors.shapes(row))],
  ];
}

function sidesText([a, b]) {
  return a === b ? a : `${a} in a, ${b} in b`;
}

function moreFacts(more) {
  if (more === null) return [];
  const [rowsA, rowsB] = more.vocabulary_rows_left_out;
  return [
    ...more.broken.map((bound) => ["bound that does not hold", brokenText(bound)]),
    [
      "beyond the tolerance",
      more.beyond_tolerance === null ? null : counted(more.beyond_tolerance, "element"),
    ],
    ["weak tolerance", more.weak_tolerance && weakText(more.weak_tolerance)],
    ["cast", more.cast && castText(more.cast)],
    ["rule", more.rule === null ? null : `on line ${more.rule}`],
    [
      "vocabulary",
      rowsA + rowsB === 0 ? null : `left out ${grouped(rowsA)} padded rows of a, ${grouped(rowsB)} of b`,
    ],
    [
      "tied",
      more.tied_side && `to the word embeddings in ${more.tied_side}, a tensor of its own on the other side`,
    ],
    ["unread", more.error && `${more.error.side}: ${more.error.file}: ${more.error.message}`],
  ];
}

function brokenText({ bound, count, metric, value, max }) {
  if (bound === "elements") return `${counted(count, "element")} beyond the tolerance`;
  return value === null
    ? `${metric} is not defined, so not at most ${max}`
    : `${metric} ${scientific(value)} is more than ${max}`;
}

function weakText({ bound, rtol, atol, rms }) {
  if (bound === "rtol") return `zeros would hold rtol ${rtol}`;
  return `atol ${atol} is more than the RMS of b, ${scientific(rms)}`;
}

function castText({ rounded, misses }) {
  if (misses === 0) return `${rounded} is the other side rounded, every element`;
  return `${counted(misses, "element")} of ${rounded} are not the other side rounded`;
}
