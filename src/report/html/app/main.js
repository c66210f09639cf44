// From the data to the page.

function showAll(data) {
  const tensors = new Tensors(data.table);
  const view = new View();
  showSides(data);
  showErrors(data);
  showCoverage(data);
  showCauses(data);
  showState(data);
  showReplicas(tensors);
  showUnpaired(data, tensors, view);
  showProblems(data);
  showJudging(data);
  byId("footer").textContent = `${data.tool.name} ${data.tool.version}`;
  if (tensors.count === 0) return;
  showHistograms(tensors, view);
  new Filters(tensors, view);
  const table = new Table(tensors, view);
  showDetails(tensors, view);
  const depth = new Depth(tensors, view);
  preparePrint(table, depth);
}

/** On paper all is light, and the table shows its first rows. */
function preparePrint(table, depth) {
  const print = (isOnPaper) => {
    isPrinting = isOnPaper;
    table.printed();
    depth.draw();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
}

async function start() {
  const status = byId("status");
  try {
    showAll(await readData());
    status.remove();
    document.documentElement.dataset.ready = "true";
    performance.mark("ready");
  } catch (error) {
    status.textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
    throw error;
  }
}

await start();
