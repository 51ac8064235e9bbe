// Shows the value under the pointer. The page is whole without it.
for (const plot of document.querySelectorAll(".plot[data-readings]")) {
  const readings = JSON.parse(plot.dataset.readings), svg = plot.querySelector("svg");
  const output = plot.parentElement.querySelector("output"), cross = svg.querySelector(".cross");
  if (!readings.length || !output) continue;
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
