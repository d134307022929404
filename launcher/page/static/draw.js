"use strict";
// The answers of a server by path, which a file of `sluice report` has in place of a server.
const held = JSON.parse(document.getElementById("held")?.textContent ?? "null");

// Helpers of all views. Every text of a run becomes a text node, so that the browser runs nothing in it.
const COLOURS = ["#1F86C9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B8A800", "#999999", "#7B61C4", "#A65628", "#4C8C4A"];
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

// Text as `sluice samples` shows it: control characters and changes of the writing direction by their code.
function shown(text) {
  return String(text).replace(CONTROL, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

// An element with attributes and children; any other child is a text.
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

// A name has the same colour everywhere: known causes and phases have their own, other names one by their letters.
const KNOWN = ["train", "generate", "score", "publish", "reference", "probe", "admit", "dispatch", "agent", "policy", "tool"];
function colour(name) {
  if (name === "down") return ink("--bad");
  const at = KNOWN.indexOf(name);
  return COLOURS[(at >= 0 ? at : [...name].reduce((sum, letter) => (31 * sum + letter.charCodeAt(0)) % 9973, 7)) % COLOURS.length];
}

// The cause in "CAUSE PROCESS"; a cause may be two words.
const causeOf = (name) => KNOWN.find((cause) => name === cause || name.startsWith(`${cause} `)) || name;

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
