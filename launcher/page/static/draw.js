"use strict";
// What all views draw with. Every text of a run becomes a text node, in which nothing is an order.
const COLOURS = ["#1F86C9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B8A800", "#999999", "#7B61C4", "#A65628", "#4C8C4A"];
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

// As `sluice samples` shows it: control characters and those that change the direction of writing by their code.
function shown(text) {
  return String(text).replace(CONTROL, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

// An element with attributes and children; a child that is no element is a text.
function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : shown(child));
  }
  return element;
}

function table(head, rows) {
  const cell = (value) => make("td", typeof value === "number" ? { class: "number" } : {}, typeof value === "number" ? number(value) : value);
  const body = rows.map((row) => make("tr", {}, row.map(cell)));
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, head.map((name) => make("th", {}, name)))), make("tbody", {}, body)));
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString();
}

const seconds = (value) => (value >= 100 ? `${Math.round(value)} s` : value >= 0.1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(1)} ms`);

// The same name has the same colour everywhere: causes and phases that are known one of their own, others by their letters.
const KNOWN = ["train", "generate", "score", "publish", "reference", "probe", "admit", "dispatch", "agent", "policy", "tool"];
function colour(name) {
  if (name === "down") return ink("--bad");
  const at = KNOWN.indexOf(name);
  return COLOURS[(at >= 0 ? at : [...name].reduce((sum, letter) => (31 * sum + letter.charCodeAt(0)) % 9973, 7)) % COLOURS.length];
}

// Of "CAUSE PROCESS", where a cause may be two words.
const causeOf = (name) => KNOWN.find((cause) => name === cause || name.startsWith(`${cause} `)) || name;

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// plotly is loaded with the first plot.
let plotly = null;
function loaded() {
  plotly = plotly || new Promise((resolve, reject) => {
    document.head.append(make("script", { src: "/static/plotly.js", onload: resolve, onerror: () => reject(new Error("no plotly.js")) }));
  });
  return plotly;
}

function coloured(layout) {
  const axis = { gridcolor: ink("--line"), linecolor: ink("--line"), zerolinecolor: ink("--line"), automargin: true };
  return {
    autosize: true, height: 320, margin: { l: 56, r: 12, t: 30, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink("--ink") }, hoverlabel: { bgcolor: ink("--card"), font: { color: ink("--ink") }, namelength: -1 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
  };
}

async function plot(element, data, layout, clicked) {
  await loaded();
  const settings = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["resetScale2d"]] };
  await Plotly.react(element, data, coloured(layout), settings);
  if (clicked && !element.dataset.clicks) {
    element.dataset.clicks = "1";
    element.on("plotly_click", (event) => clicked(event.points[0]));
  }
}
