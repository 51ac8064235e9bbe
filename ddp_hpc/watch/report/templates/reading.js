// Shows the value under the pointer. The page is whole without it.
for (const plot of document.querySelectorAll(".plot[data-readings]")) {
  const readings = JSON.parse(plot.dataset.readings), svg = plot.querySelector("svg");
  const output = plot.parentElement.querySelector("output"), cross = svg.querySelector(".cross");
  const [low, high] = JSON.parse(plot.dataset.span);
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const step = low + (high - low) * (event.clientX - box.left) / box.width;
    let best = readings[0];
    for (const one of readings) if (Math.abs(one[0] - step) < Math.abs(best[0] - step)) best = one;
    const x = 1000 * (best[0] - low) / (high - low);
    cross.setAttribute("d", `M${x} 0V1000`);
    output.textContent = `step ${best[0]}: ${best[1]}`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerleave", () => { cross.setAttribute("d", ""); output.textContent = ""; });
}
// Sorts a table by the column whose heading is clicked; values that are not known stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
      const keyed = [...body.rows].map((row) => [value(row, column), row]);
      const known = keyed.filter(([text]) => text !== ""), unknown = keyed.filter(([text]) => text === "");
      const areNumbers = known.every(([text]) => !isNaN(text));
      known.sort(([a], [b]) => way * (areNumbers ? a - b : a.localeCompare(b, undefined, {numeric: true})));
      body.append(...[...known, ...unknown].map(([, row]) => row));
    });
  });
}
