// Read-outs of the curves: under the pointer, and by the arrow keys. The page is complete without this.
"use strict";
for (const plot of document.querySelectorAll(".plot[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart);
  const steps = [...new Set(chart.lines.flatMap((line) => (line.tone ? line.x : [])))].sort((a, b) => a - b);
  let cross = null, read = null, at = steps.length - 1;

  const write = (value) => {
    const size = Math.abs(value);
    if (chart.unit === "%") return value.toFixed(size && size < 0.995 ? 2 : 1);  // as in the rest of the page
    if (size && size < 0.001) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] > x) high = middle; else low = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const fraction = (value, [from, to]) => (to > from ? (value - from) / (to - from) : 0.5);

  const show = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    if (!cross) {
      cross = plot.appendChild(Object.assign(document.createElement("div"), { className: "cross" }));
      read = plot.appendChild(Object.assign(document.createElement("div"), { className: "read" }));
      read.setAttribute("aria-live", "polite");
    }
    const x = steps[at], left = fraction(x, chart.x);
    cross.style.left = `${left * 100}%`;
    read.style.left = left < 0.5 ? `calc(${left * 100}% + 10px)` : "auto";
    read.style.right = left < 0.5 ? "auto" : `calc(${(1 - left) * 100}% + 10px)`;
    cross.replaceChildren();
    read.replaceChildren();
    const row = (text, kind) =>
      read.appendChild(Object.assign(document.createElement("span"), { textContent: text, className: kind }));
    row(`${chart.name} ${chart.ticks[x] ?? x.toLocaleString("en")}`, "");
    for (const line of chart.lines) {
      if (!line.tone) continue;
      const i = nearest(line.x, x);
      if (chart.ticks[x] && line.x[i] !== x) continue;  // nothing was measured there
      row(`${line.name} ${write(line.y[i])}${chart.unit}`, "");
      const dot = cross.appendChild(Object.assign(document.createElement("b"), { className: `t${line.tone}` }));
      dot.style.top = `${(1 - fraction(line.y[i], chart.y)) * 100}%`;
    }
  };
  const hide = () => {
    if (cross) { cross.remove(); read.remove(); cross = read = null; }
  };

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const left = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    show(nearest(steps, chart.x[0] + left * (chart.x[1] - chart.x[0])));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(at); });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at + move);
  });
}
