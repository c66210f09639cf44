// The head of the page: both sides, errors, coverage.

function showSides(data) {
  const parts = ["a", "b"].flatMap((side) => [make("dt", {}, side), sideDescription(data.sides[side])]);
  byId("sides").replaceChildren(...parts);
}

function sideDescription(side) {
  const facts = [
    side.format,
    side.layout,
    side.iteration === null ? null : `iteration ${side.iteration}`,
    side.writer,
    side.shards === null ? null : counted(side.shards, "shard"),
  ];
  const resolved =
    side.resolved !== null && side.resolved !== side.path
      ? make("div", { class: "path" }, side.resolved)
      : null;
  const notes = (side.notes ?? []).map((note) => make("div", { class: "hint" }, note));
  const text = facts.filter(Boolean).join(", ");
  return make(
    "dd",
    {},
    make("div", { class: "path" }, side.path),
    resolved,
    make("div", { class: "facts" }, text),
    notes,
  );
}

function showErrors(data) {
  const list = byId("errors");
  list.replaceChildren(...data.errors.map((line) => make("li", {}, line)));
  list.hidden = data.errors.length === 0;
}

function showCoverage(data) {
  if (data.totals === null) return;
  const facts = coverageFacts(data);
  const row = ([title, value, note]) => [
    make("dt", {}, title),
    make(
      "dd",
      {},
      make("span", { class: "number" }, value),
      note ? make("span", { class: "note" }, note) : null,
    ),
  ];
  show("coverage", make("dl", { class: "facts-list" }, facts.flatMap(row)));
}

/** Title, number and remark of all that was compared and was not. */
function coverageFacts(data) {
  const { totals, sides, sections } = data;
  const facts = [
    ["compared", grouped(totals.compared), "tensors"],
    ["elements", grouped(totals.elements), `${bytes(totals.bytes)} on both sides`],
    ["pass", grouped(totals.passing), null],
    ["do not pass", grouped(totals.failing), null],
  ];
  for (const [verdict, count] of Object.entries(totals.verdicts)) {
    if (count > 0) facts.push([verdict, grouped(count), percent(count, totals.tensors)]);
  }
  for (const side of ["a", "b"]) facts.push([`only in ${side}`, grouped(totals.only_in[side]), null]);
  facts.push(["copies that disagree", grouped(totals.replicas_that_disagree), null]);
  facts.push(["problems", grouped(totals.problems), null]);
  for (const side of ["a", "b"]) {
    const leftOut = sides[side].left_out ?? 0;
    if (leftOut > 0) facts.push([`buffers left out of ${side}`, grouped(leftOut), "no weights"]);
  }
  facts.push(["sections compared", sections.compared.join(", "), notComparedText(sections, sides)]);
  return facts;
}

/** The sections that were not compared, with what of them is there. */
function notComparedText(sections, sides) {
  const texts = sections.not_compared.map((section) => {
    const there = ["a", "b"].filter((side) =>
      (sides[side].unread ?? []).some((one) => one.section === section),
    );
    return there.length > 0 ? `${section} (there in ${there.join(" and ")})` : section;
  });
  return texts.length > 0 ? `not compared: ${texts.join(", ")}` : null;
}
