// Copies, names without a partner, problems, and what it was judged by.

/** Entries of a list before it is cut, saying so. */
const MOST_ENTRIES = 200;

function replicaTable(copies) {
  const row = ([name, copy]) => [
    ...(name === null ? [] : [shortened(name, 80)]),
    copy.side,
    shortened(copy.copy, 60),
    shortened(copy.first, 60),
    scientific(copy.l2),
    scientific(copy.max_abs),
    grouped(copy.differing),
    copy.disagrees ? "disagrees" : "part of a sum",
  ];
  const headings = ["side", "copy", "first copy", "l2", "max_abs", "differing", ""];
  const isNamed = copies[0][0] !== null;
  const numeric = [3, 4, 5].map((column) => column + (isNamed ? 1 : 0));
  return plainTable(
    isNamed ? ["tensor", ...headings] : headings,
    copies.slice(0, MOST_ENTRIES).map(row),
    numeric,
  );
}

function showReplicas(tensors) {
  const copies = Object.entries(tensors.columns.more).flatMap(([row, { replicas }]) =>
    replicas.map((copy) => [tensors.name(Number(row)), copy]),
  );
  if (copies.length === 0) return;
  show("replicas", replicaTable(copies), cutNote(copies.length));
}

function cutNote(count) {
  if (count <= MOST_ENTRIES) return null;
  return make("p", { class: "hint" }, `the first ${MOST_ENTRIES} of ${grouped(count)}`);
}

/** Why tensors differ, where a cause explains every value. */
function showCauses({ causes }) {
  if (causes === null || causes.searched === 0) return;
  const row = ({ subject, text, tensors, of }) => [
    of === null ? grouped(tensors.length) : `${grouped(tensors.length)} of ${grouped(of)}`,
    subject ?? "",
    text,
    shortened(tensors[0] ?? "", 80),
  ];
  const explained = `${grouped(causes.explained)} of ${counted(causes.searched, "tensor")} that differ have a cause`;
  const skipped = causes.skipped.length > 0 ? `; not looked at: ${counted(causes.skipped.length, "tensor")}` : "";
  const found = causes.found.slice(0, MOST_ENTRIES).map(row);
  show(
    "causes",
    make("p", { class: "hint" }, explained + skipped),
    found.length > 0 ? plainTable(["tensors", "of", "cause", "the first"], found, [0]) : null,
    cutNote(causes.found.length),
  );
}

/** What is kept beside the tensors: the keys that differ with both values, and what did not count. */
function showState({ state }) {
  if (state === null) return;
  const value = (text) => (text === null ? "nothing" : shortened(text, 80));
  const row = ({ path, place, values }) => [shortened(path, 80), place ?? "", value(values.a), value(values.b)];
  const { differences, ignored, unread } = state;
  const count = `${counted(state.compared, "key")} compared, ${grouped(differences.length)} of them differ`;
  show(
    "state",
    make("p", { class: "hint" }, count),
    differences.length > 0
      ? plainTable(["key", "where", "a", "b"], differences.slice(0, MOST_ENTRIES).map(row))
      : null,
    cutNote(differences.length),
    foldedTable("not read", unread, ["key", "why"], ({ path, message }) => [shortened(path, 80), message]),
    foldedTable("differ as they may", ignored, ["key", "where", "a", "b", "why"], (one) => [...row(one), one.why]),
  );
}

/** A table to be opened; nothing without entries. */
function foldedTable(title, entries, headings, row) {
  if (entries.length === 0) return null;
  return make(
    "details",
    {},
    make("summary", {}, `${title}: ${grouped(entries.length)}`),
    plainTable(headings, entries.slice(0, MOST_ENTRIES).map(row)),
    cutNote(entries.length),
  );
}

function showUnpaired(data, tensors, view) {
  const verdicts = ["only in a", "only in b", "only in a, allowed", "only in b, allowed", "ignored"];
  const lists = verdicts
    .map((verdict) => [verdict, rowsWith(tensors, verdict)])
    .filter(([, rows]) => rows.length > 0);
  if (lists.length === 0) return;
  const parts = lists.map(([verdict, rows]) => unpairedList(tensors, view, verdict, rows));
  show("unpaired", parts, partnerTable(data.suggested));
}

/** Names that stand for the same values, and the rules that bring them together. */
function partnerTable(suggested) {
  if (suggested === null || suggested.partners.length === 0) return null;
  const { partners, map } = suggested;
  const row = ({ a, b, values }) => [shortened(a, 80), shortened(b, 80), values];
  return make(
    "div",
    {},
    make("h3", {}, `Likely partners: ${grouped(partners.length)}`),
    plainTable(["in a", "in b", "values"], partners.slice(0, MOST_ENTRIES).map(row)),
    cutNote(partners.length),
    map.length > 0 ? make("p", { class: "hint" }, "As rules for --map:") : null,
    map.length > 0
      ? make(
          "ul",
          { class: "names name" },
          map.map((rule) => make("li", {}, rule)),
        )
      : null,
  );
}

function rowsWith(tensors, verdict) {
  const rows = [];
  for (let row = 0; row < tensors.count; row += 1) if (tensors.verdict(row) === verdict) rows.push(row);
  return rows;
}

function unpairedList(tensors, view, verdict, rows) {
  const list = () => {
    view.set({ q: "", verdict, cell: null, row: null });
    byId("tensors").scrollIntoView({ block: "start" });
  };
  const names = rows
    .slice(0, MOST_ENTRIES)
    .map((row) => make("li", { class: "name" }, shortened(tensors.name(row), 300)));
  return make(
    "details",
    { open: rows.length <= 20 },
    make("summary", {}, `${verdict}: ${counted(rows.length, "name")}`),
    make("ul", { class: "names" }, names),
    cutNote(rows.length),
    make("button", { type: "button", click: list }, "list in the table"),
  );
}

function showProblems(data) {
  const problems = ["a", "b"].flatMap((side) =>
    (data.sides[side].problems ?? []).map((problem) => [side, problem]),
  );
  const remarks = remarksOf(data);
  if (problems.length + remarks.length === 0) return;
  const row = ([side, { file, tensor, message }]) => [
    side,
    file ?? "",
    tensor === null ? "" : shortened(tensor, 80),
    message,
  ];
  show(
    "problems",
    problems.length > 0
      ? plainTable(["side", "file", "tensor", "problem"], problems.slice(0, MOST_ENTRIES).map(row))
      : null,
    cutNote(problems.length),
    remarks.length > 0
      ? make(
          "ul",
          { class: "messages" },
          remarks.map((remark) => make("li", {}, remark)),
        )
      : null,
  );
}

function remarksOf(data) {
  const globs = (data.unused_globs ?? []).map(
    (glob) => `${glob}: matches no name; a glob has to match all of one`,
  );
  const rules = (data.unused_rules ?? []).map((rule) => {
    const trouble = rule.required ? ", which is required" : "";
    return `the rule on line ${rule.line} decides about no tensor${trouble}: ${rule.match.join(", ")}`;
  });
  return [...globs, ...rules];
}

function showJudging(data) {
  if (data.options === null) return;
  const {
    bounds,
    rules,
    include,
    exclude,
    vocab_size: vocabulary,
    allow_diverged: allowsDiverged,
  } = data.options;
  const facts = [
    ["bounds", boundsText(bounds)],
    ...include.map((glob) => ["only names", glob]),
    ...exclude.map((glob) => ["not names", glob]),
    ["vocabulary", vocabulary === null ? null : counted(vocabulary, "row")],
    ["copies that disagree", allowsDiverged ? "are no difference" : null],
    [
      "exit code",
      `${data.exit_code}${data.exit_zero && data.exit_code === 1 ? ", the process exits with 0 as asked" : ""}`,
    ],
  ];
  const entries = facts.filter(([, text]) => text !== null);
  const list = make(
    "dl",
    { class: "detail-list" },
    entries.flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]),
  );
  show("judging", list, rules.length > 0 ? ruleTable(rules) : null);
}

function ruleTable(rules) {
  const row = (rule) => [String(rule.line), rule.match.join(", "), ruleText(rule)];
  return plainTable(["line", "names", "rule"], rules.slice(0, MOST_ENTRIES).map(row), [0]);
}

function ruleText(rule) {
  const parts = [
    rule.ignore ? "ignored" : boundsText(rule.bounds),
    rule.allow_missing.length > 0 ? `may be missing in ${rule.allow_missing.join(" and ")}` : null,
    rule.required ? "required" : null,
  ];
  return parts.filter(isContent).join("; ");
}

function boundsText({ rtol, atol, tolerance, max, allow_cast: allowsCast, equal_nan: equalNan }) {
  const parts = [
    rtol === null ? null : `rtol ${rtol}`,
    atol === null ? null : `atol ${atol}`,
    tolerance === null ? null : `tolerance ${tolerance}`,
    ...Object.entries(max).map(([metric, bound]) => `${metric} at most ${bound}`),
    allowsCast ? "exact casts pass" : null,
    equalNan ? "NaN at the same place is equal" : null,
  ];
  return parts.filter(isContent).join(", ") || "equal values";
}
