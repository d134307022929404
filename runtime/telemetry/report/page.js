"use strict";
// Draws each figure when it comes near to being seen, so that the page is there at once, in the colours of the page.
(() => {
  const drawn = new Set();
  const root = document.documentElement;
  // Named one by one: plotly.js has buttons that send a figure's data away.
  const buttons = [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]];
  const settings = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: buttons };

  function colours() {
    const style = getComputedStyle(root);
    const [ink, line, card] = ["--ink", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
    const found = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink,
      "font.family": getComputedStyle(document.body).fontFamily,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": line, "modebar.activecolor": ink,
      "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": line, "hoverlabel.font.color": ink,
    };
    for (const axis of ["xaxis", "yaxis"]) {
      Object.assign(found, { [`${axis}.gridcolor`]: line, [`${axis}.linecolor`]: line, [`${axis}.zerolinecolor`]: line });
    }
    return [found, ink];
  }

  function paint(plot) {
    const [found, ink] = colours();
    const wall = plot.data.flatMap((trace, index) => (trace.line && trace.line.dash ? [index] : []));
    if (wall.length) {
      Plotly.update(plot, { "line.color": ink }, found, wall);
    } else {
      Plotly.relayout(plot, found);
    }
  }

  function draw(plot) {
    if (drawn.has(plot)) return;
    drawn.add(plot);
    const figure = JSON.parse(plot.nextElementSibling.textContent);
    figure.layout.autosize = true;
    Plotly.newPlot(plot, figure.data, figure.layout, settings).then(() => paint(plot));
  }

  const plots = document.querySelectorAll(".plot");
  const near = new IntersectionObserver(
    (seen) => seen.filter((one) => one.isIntersecting).forEach((one) => { near.unobserve(one.target); draw(one.target); }),
    { rootMargin: "600px" },
  );
  plots.forEach((plot) => near.observe(plot));
  window.addEventListener("beforeprint", () => plots.forEach(draw));

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const repaint = () => drawn.forEach(paint);
  dark.addEventListener("change", repaint);
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    repaint();
  });
})();
