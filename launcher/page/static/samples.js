"use strict";
// Samples: a list where only the visible rows exist, and one group with its siblings, token by token.
const ROW = 26; // pixels of a row
const CHUNK = 20; // groups in one request

class SampleList {
  constructor(ask, open) {
    this.ask = ask; // (view, query) → data
    this.open = open; // (group id)
    this.inside = make("div", {});
    this.list = make("div", { class: "list", tabindex: "0", role: "listbox", "aria-label": "samples", onscroll: () => this.paint() }, this.inside);
    this.status = make("p", { class: "faint", role: "status" });
    this.form = this.fields();
    const head = make("div", { class: "row head" }, ["group", "step", "reward", "tokens", "version", "reply"].map((name) => make("span", {}, name)));
    this.element = make("div", {}, held ? null : this.form, this.status, head, this.list);
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.selected = 0;
  }

  fields() {
    const field = (name, hint, wide) => make("input", { name, placeholder: hint, "aria-label": hint, class: wide ? "wide" : "" });
    const states = make("select", { name: "states", "aria-label": "state" },
      ["any state", "retired", "consumed", "ready", "generated", "dropped"].map((name, at) => make("option", { value: at ? name : "" }, name)));
    const form = make("form", { class: "form", onsubmit: (event) => { event.preventDefault(); this.search(); } },
      field("text", "text, in prompt or reply", true), states, field("step-from", "step ≥"), field("step-to", "step ≤"),
      field("reward-from", "reward ≥"), field("reward-to", "reward ≤"), field("tokens-from", "tokens ≥"), field("tokens-to", "tokens ≤"),
      field("source", "source"), field("replica", "rollout"), make("button", {}, "search"));
    return form;
  }

  query() { return Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value !== "")); }

  async search(after) {
    const query = this.query();
    const found = await this.ask("samples", after === undefined ? query : { ...query, after });
    this.ids = found.ids;
    this.lines = new Map(); // group id → its rows, or a promise of them
    this.begins = [0];
    for (const rows of found.rows) this.begins.push(this.begins[this.begins.length - 1] + rows);
    const total = this.begins[this.begins.length - 1];
    this.inside.style.height = `${total * ROW}px`;
    this.inside.replaceChildren();
    this.status.replaceChildren(`${number(total)} samples in ${number(this.ids.length)} groups${found.of > this.ids.length ? `, the newest of ${number(found.of)}` : ""} `);
    if (found.next !== null) this.status.append(make("button", { type: "button", onclick: () => this.search(found.next) }, "search on"));
    if (after === undefined) this.list.scrollTop = 0;
    this.selected = 0;
    this.paint();
  }

  // The index of the group with row `at`.
  groupAt(at) {
    let low = 0, high = this.ids.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.begins[middle] <= at) low = middle; else high = middle - 1;
    }
    return low;
  }

  paint() {
    if (!this.ids) return;
    const total = this.begins[this.begins.length - 1];
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 5);
    const last = Math.min(total, first + Math.ceil(this.list.clientHeight / ROW) + 10);
    const rows = [];
    const missing = new Set();
    for (let at = first; at < last; at += 1) {
      const index = this.groupAt(at), id = this.ids[index], lines = this.lines.get(id);
      if (!Array.isArray(lines) && !this.lines.has(id)) missing.add(index);
      rows.push(this.row(at, id, Array.isArray(lines) ? lines[at - this.begins[index]] : null));
    }
    this.inside.replaceChildren(...rows);
    if (missing.size) this.fetch(Math.min(...missing), Math.max(...missing));
  }

  row(at, id, line) {
    const cells = line === null || line === undefined ? [id, "", "…"] :
      [id, line.step ?? "", line.reward === null ? "–" : number(line.reward), line.tokens, line.versions[0], line.reply.slice(0, 400)];
    return make("div", { class: "row", role: "option", style: `top:${at * ROW}px`, "aria-selected": at === this.selected ? "true" : undefined, onclick: () => this.choose(at) },
      cells.map((cell) => make("span", {}, String(cell))));
  }

  async fetch(first, last) {
    const ids = this.ids.slice(Math.max(0, first - 2), Math.min(last + 3, first + CHUNK * 4));
    const wanted = ids.filter((id) => !this.lines.has(id));
    wanted.forEach((id) => this.lines.set(id, "asked"));
    for (const row of await this.ask("rows", { groups: wanted.join(",") })) {
      if (!Array.isArray(this.lines.get(row.group))) this.lines.set(row.group, []);
      this.lines.get(row.group).push(row);
    }
    wanted.filter((id) => !Array.isArray(this.lines.get(id))).forEach((id) => this.lines.set(id, []));
    requestAnimationFrame(() => this.paint());
  }

  choose(at) {
    this.selected = at;
    this.paint();
    this.open(this.ids[this.groupAt(at)]);
  }

  key(event) {
    const total = this.begins ? this.begins[this.begins.length - 1] : 0;
    const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    if (by !== undefined && total) {
      event.preventDefault();
      this.selected = Math.min(total - 1, Math.max(0, this.selected + by));
      const top = this.selected * ROW;
      if (top < this.list.scrollTop || top > this.list.scrollTop + this.list.clientHeight - ROW) this.list.scrollTop = top - this.list.clientHeight / 2;
      this.paint();
    } else if (event.key === "Enter" && total) this.choose(this.selected);
  }
}

// The difference between the sampled log-probability and the trainer's, if both are known.
const gapOf = (token) => (token[3] && token[5] !== null ? Math.abs(token[1] - token[5]) : 0);

// The figures by which tokens are coloured, each with its meaning.
const FIGURES = {
  "log-probability as sampled": (token) => -token[1] / 5,
  "gap to the trainer": (token) => 10 * gapOf(token),
  advantage: (token) => Math.abs(token[6] ?? 0) / 2,
  "gap to the reference": (token) => (token[4] === null ? 0 : Math.abs(token[1] - token[4])),
  version: (token, versions) => versions.indexOf(token[2]) / Math.max(1, versions.length - 1),
  "trained here": (token) => (token[3] ? 1 : 0),
};

function groupView(group) {
  if (group === null) return make("p", {}, "There is no such group.");
  const choice = make("select", { "aria-label": "colour tokens by" }, Object.keys(FIGURES).map((name) => make("option", {}, name)));
  const sorting = make("select", { "aria-label": "order" }, ["as sampled", "highest reward first", "largest gap first"].map((name) => make("option", {}, name)));
  const siblings = make("div", { class: "siblings" });
  const gap = (sample) => (sample.tokens_shown || []).reduce((most, token) => Math.max(most, gapOf(token)), 0);
  const episodes = new Map();
  for (const sample of group.samples) episodes.set(sample.sample, [...(episodes.get(sample.sample) || []), sample]);
  const draw = () => {
    const sorted = [...episodes.values()];
    const most = (rows) => Math.max(...rows.map(gap));
    if (sorting.value === "highest reward first") sorted.sort(([a], [b]) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    if (sorting.value === "largest gap first") sorted.sort((a, b) => most(b) - most(a));
    siblings.replaceChildren(...sorted.map((rows) => episodeView(rows, FIGURES[choice.value], gap)));
  };
  choice.addEventListener("change", draw);
  sorting.addEventListener("change", draw);
  draw();
  const order = ["admitted", "generating", "generated", "scored", "referenced", "valued", "ready", "consumed", "retired", "dropped"];
  const times = Object.entries(group.times).sort((a, b) => a[1] - b[1] || order.indexOf(a[0]) - order.indexOf(b[0]));
  const life = times.map(([name, at], index) => (index ? `${name} + ${seconds(at - times[index - 1][1])}` : name)).join(" → ");
  const first = group.samples[0];
  return make("section", {},
    make("h2", {}, `group ${group.group_id}`), make("p", { class: "faint" }, `${group.state}${group.why ? `: ${group.why}` : ""}${group.step === null ? "" : `, step ${group.step}`}, ${group.replica || "no rollout"}, attempt ${group.attempt}; label `, make("b", {}, group.label)),
    make("p", { class: "faint" }, life), first ? make("div", { class: "text" }, first.prompt) : null,
    make("p", { class: "form" }, choice, sorting), siblings);
}

// The common beginning of an episode's rows is shown once; where the rows differ, each goes on as a branch.
function treeOf(rows, at = 0) {
  let end = at;
  while (rows.every((row) => end < row.length && row[end][0] === rows[0][end][0])) end += 1;
  const tokens = rows[0].slice(at, end).map((token, index) => rows.map((row) => row[at + index]).find((one) => one[3]) || token);
  const next = new Map();
  for (const row of rows.filter((each) => end < each.length)) next.set(row[end][0], [...(next.get(row[end][0]) || []), row]);
  return { tokens, branches: [...next.values()].map((some) => treeOf(some, end)) };
}

function tokenView(token, strength) {
  const known = [["trained", 5], ["reference", 4], ["advantage", 6]].filter(([, at]) => token[at] !== null).map(([name, at]) => `, ${name} ${token[at]}`);
  const details = `log p ${token[1]}, version ${token[2]}${known.join("")}${token[3] ? "" : ", not trained here"}`;
  return make("span", { class: token[3] ? "token" : "token given", title: details, style: `background:rgba(213,94,0,${(0.75 * strength).toFixed(2)})` }, token[0]);
}

// One sample; for an episode with branches all its rows, as the tree of its conversation.
function episodeView(rows, figure, gap) {
  const all = rows.map((row) => row.tokens_shown || []);
  const versions = [...new Set(all.flat().map((token) => token[2]))].sort();
  const draw = (node) => [make("div", { class: "text" }, node.tokens.map((token) => tokenView(token, Math.min(1, Math.max(0, figure(token, versions)))))),
    node.branches.length ? make("ul", { class: "tree" }, node.branches.map((branch) => make("li", {}, draw(branch)))) : null];
  return make("article", { class: "sibling" }, rows.map((row) => rowHead(row, gap(row), rows.length > 1)), draw(treeOf(all)));
}

function rowHead(sample, gap, branched) {
  const advantages = new Set((sample.tokens_shown || []).map((token) => token[6]).filter((value) => value !== null));
  const advantage = advantages.size === 1 ? `advantage ${[...advantages][0].toFixed(3)}, ` : "";
  const rules = Object.entries(sample.rules).map(([name, value]) => `${name} ${value === null ? "failed" : number(value)}`).join(", ");
  const gaps = gap ? `, largest gap ${gap.toFixed(3)}` : "";
  return make("p", {}, make("b", {}, sample.reward === null ? "no reward" : sample.valid ? `reward ${number(sample.reward)}` : "masked"),
    ` ${rules ? `(${rules}) ` : ""}`, make("span", { class: "faint" }, `${branched ? `branch ${sample.sample}.${sample.branch}, ` : ""}${advantage}${sample.tokens} tokens, ${sample.finish}, versions ${[...new Set(sample.versions)].join("–")}${gaps}`));
}
