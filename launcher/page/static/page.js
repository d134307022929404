"use strict";
// Shows a run's view (by the address: #RUN/VIEW?key=value), and follows the run live.
const page = {
  runs: [], run: null, view: null, shown: null, query: {}, search: null,

  async ask(view, query, run) {
    const given = Object.entries(query || {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
    const path = `/api/run/${encodeURIComponent(run || page.run)}/${view}`;
    if (held) return heldAnswer(path, new URLSearchParams(given));
    const answer = await fetch(`${path}?${new URLSearchParams(given)}`, { signal: leaving.signal });
    if (!answer.ok) {
      const body = await answer.text();
      throw new Error(body.startsWith("{") ? JSON.parse(body).error : body.slice(0, 500));
    }
    return answer.json();
  },

  // Runs of the same name differ by their folders.
  called(run) { return this.runs.length > 1 && run.id !== run.name ? `${run.id} (${run.name})` : run.name; },

  link(view, query) { return `#${encodeURIComponent(page.run)}/${view}?${new URLSearchParams(query || {})}`; },
};

function heldAnswer(path, query) {
  const found = path.endsWith("/rows") ? query.get("groups").split(",").flatMap((id) => held[path.replace("rows", `group?id=${id}`)].samples) :
    path.endsWith("/group") ? held[`${path}?${query}`] : held[path];
  if (found === undefined) throw new Error("This is not in the file: `sluice page` shows all of a run.");
  if (found.error) throw new Error(found.error);
  return found;
}

const main = document.getElementById("main");
let leaving = new AbortController(); // aborts the requests of a view that the user leaves
let busy = false, again = false, events = null;

async function show(fresh) {
  if (busy) { again = again === true || fresh; return; }
  busy = true;
  const view = page.view;
  try {
    if (fresh === true) { main.replaceChildren(); page.search = null; }
    if (view === null) await showRuns(page, main);
    else await VIEWS[view].show(page, main);
    page.shown = view;
  } catch (error) {
    if (error.name !== "AbortError") main.replaceChildren(make("p", { class: "note" }, error.message));
  } finally {
    busy = false;
    if (again) { const next = again; again = false; show(next); }
  }
}

async function summarise() {
  const found = await page.ask("summary").catch((error) => ({ name: page.run, state: error.name === "AbortError" ? "" : error.message, steps: 0, of: null, alarm: "", facts: [], notes: [] }));
  const name = shown(page.called({ id: page.run, name: found.name }));
  document.title = `${name} – Sluice`;
  document.getElementById("name").textContent = name;
  document.getElementById("state").textContent = shown(`${found.state}; step ${found.steps}${found.of === null ? "" : ` of ${found.of}`}`);
  const alarm = document.getElementById("alarm");
  alarm.hidden = !found.alarm;
  alarm.textContent = shown(found.alarm);
  document.getElementById("notes").replaceChildren(...found.notes.map((note) => make("p", { class: "note" }, note)));
  document.getElementById("facts").replaceChildren(...found.facts.map(([name, value, detail]) => make("div", { class: "fact" }, make("span", {}, name), make("b", {}, value), make("span", {}, detail))));
}

// At most once a second: a look at a run must not slow it down.
let due = null, last = 0;
const pending = new Set();
function soon(kinds) {
  kinds.forEach((kind) => pending.add(kind));
  due = due || setTimeout(() => {
    const shows = page.view !== null && VIEWS[page.view].follows.some((kind) => pending.has(kind));
    const summary = pending.has("metrics") || pending.has("state");
    pending.clear();
    due = null;
    last = performance.now();
    if (summary) summarise();
    if (shows) show("data");
  }, Math.max(0, last + 900 - performance.now()));
}

function follow() {
  if (events) events.close();
  events = new EventSource(`/api/run/${encodeURIComponent(page.run)}/events`);
  events.onmessage = (event) => soon(JSON.parse(event.data));
}

async function route() {
  const [path, query] = location.hash.slice(1).split("?");
  const [run, view] = path.split("/").map(decodeURIComponent);
  const before = page.run;
  leaving.abort();
  leaving = new AbortController();
  page.shown = null;
  page.query = Object.fromEntries(new URLSearchParams(query || ""));
  page.run = page.runs.some((each) => each.id === run) ? run : page.runs.length === 1 ? page.runs[0].id : null;
  page.view = page.run === null ? null : view in VIEWS ? view : "why";
  const nav = document.getElementById("views");
  nav.replaceChildren(...(page.run === null ? [] : Object.entries(VIEWS).map(([name, { title }], at) =>
    make("a", { href: page.link(name), "aria-current": name === page.view ? "page" : undefined, title: `key ${(at + 1) % 10}` }, title))));
  const choice = document.getElementById("runs");
  choice.hidden = page.runs.length < 2;
  choice.replaceChildren(make("option", { value: "" }, "all runs"), ...page.runs.map((each) => make("option", { value: each.id, selected: each.id === page.run }, page.called(each))));
  if (page.run !== null && page.run !== before) { if (!held) follow(); await summarise(); }
  if (page.run === null) {
    if (events) { events.close(); events = null; }
    for (const id of ["notes", "facts"]) document.getElementById(id).replaceChildren();
  }
  await show(true);
}

document.getElementById("runs").addEventListener("change", (event) => { location.hash = event.target.value ? `#${encodeURIComponent(event.target.value)}/${page.view || "why"}` : ""; });
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  show(true);
});
document.addEventListener("keydown", (event) => {
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const names = Object.keys(VIEWS), at = "1234567890".indexOf(event.key);
  if (at >= 0 && at < names.length && page.run !== null) location.hash = page.link(names[at]);
  else if (event.key === "/" && page.search) { event.preventDefault(); page.search(); }
});
window.addEventListener("hashchange", route);
// An aborted request of a former view is no error.
window.addEventListener("unhandledrejection", (event) => { if (event.reason?.name === "AbortError") event.preventDefault(); });
if (held) delete VIEWS.whatif; // needs a server
(held ? Promise.resolve(held["/api/runs"]) : fetch("/api/runs").then((answer) => answer.json())).then((runs) => { page.runs = runs; return route(); })
  .catch((error) => main.replaceChildren(make("p", { class: "note" }, error.message)));
