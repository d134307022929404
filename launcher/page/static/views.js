"use strict";
// One function for each view: (page, element) → nothing; it asks for its data and fills the element.
const VIEWS = {
  why: { title: "Why", follows: ["ledger"], show: showWhy },
  lanes: { title: "Lanes", follows: [], show: showLanes },
  occupancy: { title: "Occupancy", follows: ["ledger", "metrics"], show: showOccupancy },
  samples: { title: "Samples", follows: [], show: showSamples },
  weights: { title: "Weights", follows: ["metrics"], show: showWeights },
  evaluations: { title: "Evaluations", follows: ["evaluations"], show: showEvaluations },
  curves: { title: "Curves", follows: ["metrics"], show: showCurves },
  processes: { title: "Processes", follows: ["logs"], show: showProcesses },
  configuration: { title: "Configuration", follows: [], show: showConfiguration },
  whatif: { title: "What if", follows: [], show: showWhatIf },
};

// A plot that is kept over updates, so that its zoom is kept too.
function plotIn(element, key, title) {
  const found = element.querySelector(`[data-plot="${key}"]`);
  if (found) return found;
  const made = make("div", { class: "plot", "data-plot": key });
  element.append(make("figure", { style: "margin:0" }, title ? make("figcaption", {}, title) : null, made));
  return made;
}

function part(element, key) {
  let found = element.querySelector(`[data-part="${key}"]`);
  if (!found) element.append(found = make("div", { "data-part": key }));
  return found;
}

async function showWhy(page, element) {
  const { from, to } = page.query;
  const data = await page.ask("why", { from, to });
  const most = data.steps.length ? data.totals[0].cause : "";
  part(element, "verdict").replaceChildren(make("p", { class: "note" }, most ? `${data.steps.length} steps: ${data.verdict}. What changes it: ${data.causes[most][1]}` : data.verdict),
    ...(data.steps.length && data.steps[0].step > 0 && from === undefined && !held ? [make("p", { class: "faint" }, "The newest steps. ", make("a", { href: page.link("why", { from: 0 }) }, "all"))] : []));
  part(element, "waits").replaceChildren(...(data.waits.length ? [make("h2", {}, "Waited for now"), table(["group", "state", "at", "for"],
    data.waits.map((wait) => [String(wait.group), wait.state, wait.at, seconds(wait.seconds)]))] : []));
  if (!data.steps.length) return;
  const causes = data.totals.map((total) => [total.cause, total.process]);
  const names = [...new Set(causes.map(([cause, process]) => `${cause} ${process}`.trim()))];
  const seen = {};
  const paler = (cause) => { seen[cause] = (seen[cause] ?? -1) + 1; return 0.8 ** (seen[cause] % 6); };
  const bars = names.map((name) => ({
    kind: "bar", name, x: data.steps.map((step) => step.step), colour: colour(causeOf(name)), strength: paler(causeOf(name)),
    y: data.steps.map((step) => step.parts.filter((one) => `${one[0]} ${one[3]}`.trim() === name).reduce((sum, one) => sum + one[2] - one[1], 0)),
  }));
  const shownStep = part(element, "bars");
  plot(plotIn(shownStep, "why", "Seconds of each step, by what it waited for; click one"), bars, { x: "step, from 0", y: "seconds" },
    (x) => showStep(page, part(element, "step"), data.steps.find((step) => step.step === x)));
  const all = data.steps.reduce((sum, step) => sum + step.end - step.start, 0);
  const inside = (total) => Object.entries(total.inside).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, value]) => `${name} ${Math.round(100 * value / total.seconds)} %`).join(", ");
  part(element, "totals").replaceChildren(make("h2", {}, "What the steps waited for"), table(["waited for", "by", "seconds", "share", "which meanwhile was at", "what that is", "what changes it"],
    data.totals.filter((total) => total.seconds >= 0.005 * all).map((total) => [total.cause, total.process, total.seconds, `${Math.round(100 * total.seconds / all)} %`, inside(total), ...data.causes[total.cause]])));
}

function showStep(page, element, step) {
  if (!step) return;
  element.replaceChildren(make("h2", {}, `Step ${step.step}: ${seconds(step.end - step.start)}`), table(["waited for", "by", "group", "seconds", "which meanwhile was at"],
    step.parts.map((one, at) => [one[0], one[3], one[4] >= 0 ? make("a", { href: page.link("samples", { group: one[4] }) }, String(one[4])) : "", seconds(one[2] - one[1]),
      Object.entries((step.inside || [])[at] || {}).map(([name, value]) => `${name} ${seconds(value)}`).join(", ")])),
  make("p", {}, make("a", { href: page.link("lanes", { start: step.start, end: step.end }) }, "its lanes")));
  element.scrollIntoView({ block: "nearest" });
}

async function showLanes(page, element) {
  const lanes = new Lanes((start, end, pixels) => page.ask("lanes", { start: start ?? undefined, end: end ?? undefined, pixels }));
  element.replaceChildren(make("p", { class: "form" }, make("button", { onclick: () => lanes.whole() }, "all of the run"),
    make("button", { onclick: () => lanes.zoom(1 / 2) }, "closer"), make("button", { onclick: () => lanes.zoom(2) }, "farther")), lanes.element);
  lanes.start = page.query.start ? Number(page.query.start) : null;
  lanes.end = page.query.end ? Number(page.query.end) : null;
  await lanes.load();
}

async function showOccupancy(page, element) {
  const data = await page.ask("occupancy");
  const lines = Object.entries(data.states).map(([name, counts]) => ({
    kind: "area", name, x: data.seconds, y: counts, colour: colour(name), hold: true,
  }));
  plot(plotIn(element, "states", "Groups by state; dashed: as many as staleness allows"), lines, { x: "seconds", y: "groups", bound: data.bound });
  const ages = [...new Set(data.ages.flatMap((each) => Object.keys(each)))].sort((a, b) => a - b);
  const bars = ages.map((age) => ({ kind: "bar", name: `${age} versions`, x: data.steps, y: data.ages.map((each) => each[age] || 0), colour: colour(`age ${age}`) }));
  plot(plotIn(element, "ages", `Samples by staleness, of at most ${data.staleness} versions`), bars, { x: "steps done", y: "samples" });
  const reasons = [...Object.entries(data.dropped).map(([why, count]) => [`groups dropped: ${why}`, count]), ...Object.entries(data.reasons)];
  part(element, "reasons").replaceChildren(make("h2", {}, "Groups by state, now"), table(["state", "groups"], Object.entries(data.groups)), make("h2", {}, "Lost, cut off, left out, played again"), reasons.length ? table(["reason", "number"], reasons) : make("p", { class: "faint" }, "nothing"));
}

async function showSamples(page, element) {
  const chosen = make("div", {});
  const open = async (id) => { chosen.replaceChildren(groupView(await page.ask("group", { id }))); };
  const list = new SampleList((view, query) => page.ask(view, query), open);
  element.replaceChildren(list.element, chosen);
  page.search = () => list.form.querySelector("input").focus();
  await list.search();
  if (page.query.group !== undefined) await open(page.query.group);
}

async function showWeights(page, element) {
  const data = await page.ask("weights");
  part(element, "replicas").replaceChildren(make("h2", {}, "Newest version of each rollout"), table(["rollout", "version", "checksum of it", "swaps", "reception, median", "worst"],
    data.replicas.map((each) => [each.rollout, make("span", { class: each.version < data.committed ? "bad" : "" }, `${each.version}${each.version < data.committed ? ` (behind: ${data.committed})` : ""}`),
      make("span", { class: data.disagree.includes(each.rollout) ? "bad" : "" }, `${each.checksum}${data.disagree.includes(each.rollout) ? " (others have another)" : ""}`), each.swaps, each.median === null ? "" : seconds(each.median), each.worst === null ? "" : seconds(each.worst)])));
  const steps = data.steps.map((row) => row.step);
  const drawn = (key, title, options, ...lines) => plot(plotIn(part(element, "plots"), key, title), lines.map(([name, label], at) => ({
    name: label, x: steps, y: data.steps.map((row) => row[name]), colour: COLOURS[at],
  })), { x: "steps done", zero: true, ...options });
  part(element, "plots").className = "plots";
  drawn("seconds", "Weight sync, seconds", {}, ["weight_sync/seconds", "from its start to the commit"], ["weight_sync/pause_seconds", "longest pause of a rollout"]);
  drawn("bytes", "Bytes sent", {}, ["weight_sync/bytes", "bytes"]);
  drawn("aborts", "Weight syncs that were given up", {}, ["weight_sync/aborts", "given up"]);
  drawn("mismatch", "Rollouts' log-probabilities beside the trainer's, |Δ log p|; none where they are equal", { log: true }, ["mismatch/abs_logprob", "mean"], ["mismatch/worst_rollout", "worst rollout"]);
}

async function showEvaluations(page, element) {
  const data = await page.ask("evaluations");
  const changed = data.changed.map((pair) => [make("h2", {}, `From step ${pair.from} to ${pair.to}: ${pair.number} problems changed`),
    table(["problem", "now", "before", "after"], pair.examples.map((each) => [each.problem, each.now ? "right" : "wrong", each.before, each.after]))]);
  const curve = await page.ask("metric", { name: "eval/accuracy" });
  part(element, "results").replaceChildren(data.table ? table(data.table.head, data.table.rows) : make("p", { class: "faint" }, "no evaluation yet"));
  if (curve.steps.length) plot(plotIn(element, "accuracy", "Accuracy, the mean of all sets"), [{ name: "accuracy", x: curve.steps, y: curve.values, colour: COLOURS[0] }], { x: "steps done", share: true });
  part(element, "changed").replaceChildren(...changed.flat());
}

async function showCurves(page, element) {
  const data = await page.ask("curves");
  if (data.lineages) part(element, "lineages").replaceChildren(make("h2", {}, "Lineages"), table(data.lineages.head, data.lineages.rows),
    make("p", { class: "faint" }, "Curves are of the steps that count; a dashed line marks where a later lineage went on."));
  for (const { title, panels } of data.sections) {
    const section = part(element, title);
    if (!section.childElementCount) section.append(make("h2", {}, title), make("div", { class: "plots" }), make("p", { class: "faint" }));
    const marks = data.returns.map((step) => step + 0.5);
    for (const panel of panels.filter((each) => each.series.length)) {
      const { x, unit, log, share } = panel;
      plot(plotIn(section.children[1], panel.title, panel.title), seriesOf(panel), { x, y: unit, log, share, zero: share, marks: panel.kind === "bars" ? [] : marks });
    }
    const missing = panels.filter((each) => !each.series.length).map((each) => each.title);
    section.lastElementChild.replaceChildren(missing.length ? `not measured: ${missing.join(", ")}` : "");
  }
}

// Smoothed curves over the plain curves.
function seriesOf(panel) {
  const last = panel.series.length - 1;
  const named = panel.series.map(({ name, x, y, smooth }, at) => ({ name, x, y: smooth || y, colour: COLOURS[at % COLOURS.length], width: smooth ? 2.2 : 1.8 }));
  if (panel.kind === "bars") return named.map((each) => ({ ...each, kind: "bar" }));
  if (panel.kind === "stack") return named.map((each, at) => (at < last ? { ...each, kind: "area" } : { ...each, colour: ink("--ink"), dash: true }));
  return [...named, ...panel.series.flatMap((each, at) => (each.smooth ? [{ ...named[at], y: each.y, width: 1, faint: true }] : []))];
}

async function showProcesses(page, element) {
  const data = await page.ask("processes");
  const logs = Object.entries(data.logs).map(([name, lines]) => make("details", {}, make("summary", {}, name), make("pre", {}, lines.join("\n"))));
  const mib = (bytes) => (bytes === undefined ? "" : `${Math.round(bytes / 2 ** 20)} MiB`);
  const cores = (each) => (each.cores === undefined ? "" : `${each.used.toFixed(2)} of ${each.cores}`);
  const age = (last) => (last === null ? "" : new Date(1000 * last).toLocaleTimeString());
  element.replaceChildren(make("h2", {}, "Processes"), table(["process", "rank", "incarnation", "pid", "host", "memory", "most memory", "cores used", "spans", "dropped", "last span"],
    data.processes.map((each) => [each.process, String(each.rank), String(each.incarnation), String(each.pid), each.host, mib(each.rss), mib(data.memory[each.process]?.rss_bytes), cores(each), each.spans, each.dropped, age(each.last)])),
  ...(data.startup ? [make("p", { class: "faint" }, `Start-up: ${data.startup}`)] : []), ...(data.failures.length ? [make("h2", {}, "Failures of scorers"), table(["reason", "times"], data.failures)] : []), make("h2", {}, "Logs, their last lines"), ...logs);
}

async function showConfiguration(page, element) {
  const other = make("select", { "aria-label": "compare with" }, make("option", { value: "" }, "the defaults"),
    page.runs.filter((run) => run.id !== page.run).map((run) => make("option", { value: run.id }, page.called(run))));
  const differs = make("div", {}), text = make("pre", {});
  const load = async () => {
    const data = await page.ask("configuration", { other: other.value || undefined });
    differs.replaceChildren(table(["key", other.value ? "there" : "default", "this run"], data.differs.map((row) => row.map((value) => (typeof value === "string" ? value : value === null ? "–" : JSON.stringify(value))))));
    text.replaceChildren(shown(data.text));
  };
  other.addEventListener("change", load);
  element.replaceChildren(make("p", {}, "What differs from ", other), differs, make("h2", {}, "All of it"), text);
  await load();
}

async function showWhatIf(page, element) {
  element.replaceChildren(make("p", { class: "faint" }, "simulating, with costs measured in this run …"));
  const data = await page.ask("what-if");
  const base = data.rows[0].prediction.observed.samples_per_second;
  element.replaceChildren(table(["", "samples/s", "", "staleness", "idle trainer", "idle rollouts"], data.rows.map((row) => {
    if (!row.prediction) return [row.name, `ends: ${row.fault}`, "", "", "", ""];
    const seen = row.prediction.observed, share = (role) => `${Math.round(100 * seen.idle[role])} %`;
    return [row.name, seen.samples_per_second, `${(100 * (seen.samples_per_second / base - 1)).toFixed(0)} %`, seen.staleness, share("trainer"), share("rollout")];
  })), ...data.sure.map((line) => make("p", { class: "faint" }, line)));
}

async function showRuns(page, element) {
  const compared = make("input", { "aria-label": "metric", class: "wide", list: "metrics", value: "score/mean" });
  const usual = ["score/mean", "eval/accuracy", "staleness/mean", "timing/all", "response_length/mean", "actor/entropy", "actor/grad_norm"];
  const draw = async () => {
    const found = await Promise.all(page.runs.map((run) => page.ask("metric", { name: compared.value }, run.id).catch(() => ({ steps: [], values: [] }))));
    plot(plotIn(element, "compared"), found.map((curve, at) => ({ name: page.called(page.runs[at]), x: curve.steps, y: curve.values, colour: COLOURS[at % COLOURS.length] })), { x: "steps done", y: compared.value });
  };
  compared.addEventListener("change", draw);
  const facts = [...new Set(page.runs.flatMap((run) => run.facts.map((fact) => fact[0])))];
  element.replaceChildren(table(["run", "state", "a step", "waits most for", ...facts], page.runs.map((run) => [make("a", { href: `#${encodeURIComponent(run.id)}/why` }, page.called(run)), run.state,
    run.waited.most ? seconds(run.waited.seconds) : "", run.waited.most || "", ...facts.map((name) => (run.facts.find((fact) => fact[0] === name) || ["", ""])[1])])), make("p", { class: "form" }, "compare ", compared, make("datalist", { id: "metrics" }, usual.map((value) => make("option", { value })))));
  await draw();
}
