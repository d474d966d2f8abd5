"use strict";
// Without this file pages lack only colours, cursors, updates and keys. Agents' text: textContent.
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, text, name) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
};
const json = element => (element ? JSON.parse(element.textContent) : null);
const path = text => text.split("/").map(encodeURIComponent).join("/");
const exported = document.body.dataset.export !== undefined;
const base = document.body.dataset.base || ""; // where the addresses of this store begin
document.body.classList.add("scripted");

// -- curves: one cursor for all; a click on a step opens it ---------------------------------------
const charts = new Map(); // figure -> {plot, data}
const COLOURS = ["--k0", "--k1", "--k2", "--k3", "--k4", "--k5"];

/** Columns for uPlot from one list of [step, value] for each line. */
function columns(lines) {
  const steps = [...new Set(lines.flatMap(points => points.map(p => p[0])))].sort((a, b) => a - b);
  const values = lines.map(points => {
    const known = new Map(points);
    return steps.map(step => known.get(step) ?? null);
  });
  return [steps, ...values];
}

/** Room for the longest of the numbers beside an axis. */
const beside = (_, numbers) => Math.max(50, 18 + 7 * Math.max(0, ...(numbers ?? []).map(text => text.length)));
const short = value => (value == null ? "" : String(+value.toPrecision(3)));
/** A colour of the page as one that a canvas understands. */
function colour(name) {
  const probe = make("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function draw(figure, lines, labels) {
  const place = $(".plot", figure), data = columns(lines), stroke = colour("--dim"), grid = colour("--line");
  const unit = figure.dataset.unit !== undefined, main = figure.classList.contains("main");
  const axis = {stroke, grid: {stroke: grid, width: 1}, ticks: {show: false}, font: "12px system-ui", gap: 8};
  const percent = all => all.map(value => `${+(value * 100).toPrecision(3)} %`);
  const sparse = points => points.length <= data[0].length / 2 || data[0].length < 30;
  charts.get(figure)?.plot.destroy();
  place.replaceChildren();
  const plot = new uPlot({
    width: place.clientWidth, height: main ? Math.min(290, Math.max(220, place.clientWidth / 2)) : 150,
    padding: [10, 10, 0, 0], legend: {show: false},
    cursor: {sync: {key: "steps"}, y: false, points: {size: 7}},
    scales: {x: {time: false}, y: unit ? {range: [0, 1]} : {}},
    axes: [
      {...axis, grid: {show: false}, space: 60, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5]},
      {...axis, size: beside, space: main ? 44 : 30, values: (_, all) => (unit ? percent(all) : all.map(short))},
    ],
    series: [{label: "step"}, ...labels.map((label, i) => ({
      label, stroke: colour(COLOURS[i % 6]), width: main && i === 0 ? 2.5 : 1.75, spanGaps: true,
      points: {show: sparse(lines[i]), size: main && i === 0 ? 7 : 4, fill: colour(COLOURS[i % 6])},
    }))],
    hooks: {setCursor: [u => say(figure, u, u.cursor.idx)]},
  }, data, place);
  plot.over.addEventListener("click", () => {
    const i = plot.cursor.idx, run = document.body.dataset.run;
    if (i != null && run) visit(`${base}/step/${plot.data[0][i]}/${path(run)}`);
  });
  charts.set(figure, {plot, lines, labels});
  say(figure, plot, null);
}

/** The values under the cursor, or the last ones. */
function say(figure, plot, i) {
  const now = $(".now", figure), unit = figure.dataset.unit !== undefined;
  if (!now) return;
  const text = value => (value == null ? "–" : unit ? `${+(value * 100).toPrecision(3)} %` : String(+value.toPrecision(4)));
  const last = values => values.findLast(value => value != null);
  const shown = plot.data.slice(1).map(values => text(i == null ? last(values) : values[i]));
  now.textContent = shown.join(" · ") + (i == null ? "" : ` at ${plot.data[0][i]}`);
}

const linesOf = figure => (figure.dataset.lines ? JSON.parse(figure.dataset.lines) : [[figure.dataset.name, figure.dataset.name]]);

function drawAll() {
  const all = json($("#series")), labels = json($("#labels"));
  if (!all) return;
  for (const figure of $$(".chart")) {
    const lines = linesOf(figure);
    draw(figure, labels ? all[figure.dataset.name] : lines.map(line => all[line[1]] || []), labels || lines.map(line => line[0]));
  }
}

/** Fetch the points after the last drawn ones, and add them. */
async function extendCharts() {
  const drawn = [...charts].filter(([figure]) => figure.isConnected);
  if (!drawn.length || $("#labels")) return;
  const last = points => points.at(-1)?.[0] ?? -1;
  const names = new Set(drawn.flatMap(([figure]) => linesOf(figure).map(line => line[1])));
  const after = Math.min(...drawn.flatMap(([, chart]) => chart.lines.map(last)));
  const query = [...names].map(name => `name=${encodeURIComponent(name)}`).join("&");
  const found = await (await fetch(`${base}/series/${path(document.body.dataset.run)}?after=${after}&${query}`)).json();
  for (const [figure, chart] of drawn) {
    let grown = false;
    linesOf(figure).forEach(([, metric], i) => {
      const end = last(chart.lines[i]), fresh = (found[metric] || []).filter(p => p[0] > end);
      chart.lines[i].push(...fresh);
      grown ||= fresh.length > 0;
    });
    if (!grown) continue;
    chart.plot.setData(columns(chart.lines));
    say(figure, chart.plot, null);
  }
}

// -- tokens: values are fetched and painted when a call comes into view --------------------------
const BINS = 8, values = new WeakMap(), asked = new WeakSet();
let shade = "p", held = null, waiting = [], seen = null, scales = {};

const at = (list, i) => (list.length === 0 ? null : list.length === 1 ? list[0] : list[i]);
const blocks = () => $$(".tokens");

function classOf(data, i) {
  if (shade === "none") return "";
  const value = at(data[shade === "p" ? "logp" : shade], i);
  if (!value) return "";
  if (shade === "p") return "d" + Math.round((1 - Math.exp(value)) * BINS);
  return (value > 0 ? "u" : "d") + Math.max(1, Math.min(BINS, Math.ceil(Math.abs(value) / scale() * BINS)));
}

/** The largest absolute value of the measure among the loaded calls. */
function scale() {
  if (!scales[shade]) {
    let most = 1e-12;
    for (const block of blocks()) for (const v of values.get(block)?.[shade] ?? []) most = Math.max(most, Math.abs(v));
    scales[shade] = most;
  }
  return scales[shade];
}

function paint(block) {
  const data = values.get(block);
  if (!data || block.dataset.by === shade) return;
  block.classList.toggle("signed", shade === "advantage" || shade === "psi");
  if (block.childElementCount !== data.ids.length) {
    const out = document.createDocumentFragment();
    data.ids.forEach((_, i) => out.append(make("span", data.text[i])));
    block.replaceChildren(out);
  }
  for (let i = 0, span = block.firstElementChild; span; span = span.nextElementSibling, i++) {
    const name = classOf(data, i) + (data.text[i] === "" ? " void" : "") + (span === held ? " on" : "");
    if (span.className !== name) span.className = name;
  }
  block.dataset.by = shade;
}

async function load(calls) {
  const todo = calls.filter(block => !asked.has(block));
  for (const block of todo) asked.add(block);
  if (exported) for (const block of todo) values.set(block, json(block.nextElementSibling));
  else if (todo.length) {
    const query = todo.map(block => `call=${block.dataset.call}`).join("&");
    const answer = await fetch(`${base}/tokens/${path($(".rollout").dataset.rollout)}?${query}`);
    if (!answer.ok) return;
    const found = await answer.json();
    for (const block of todo) values.set(block, found[block.dataset.call]);
  }
  if (todo.length) scales = {};
  for (const block of blocks()) if (block.inView) paint(block);
  legend();
}

function legend() {
  const place = $("#legend");
  if (!place) return;
  const signed = () => `blue: made likelier, orange underlined: less likely, up to ±${scale().toPrecision(3)}`;
  place.textContent = {p: "the more orange, the less probable it was", none: ""}[shade] ?? signed();
}

function watchTokens() {
  held = null;
  scales = {};
  seen?.disconnect();
  seen = new IntersectionObserver(found => {
    for (const one of found) {
      one.target.inView = one.isIntersecting;
      if (!one.isIntersecting) continue;
      if (values.has(one.target)) paint(one.target);
      else waiting.push(one.target);
    }
    if (waiting.length) load(waiting.splice(0));
  }, {rootMargin: "500px"});
  for (const block of blocks()) seen.observe(block);
  const calls = new IntersectionObserver(found => {
    for (const one of found) $(`.outline a[href="#${one.target.id}"]`)?.classList.toggle("here", one.isIntersecting);
  }, {rootMargin: "-120px 0px -60% 0px"});
  for (const call of $$(".call")) calls.observe(call);
  legend();
  if (location.hash) openHash();
}

function shadeBy(by) {
  const start = performance.now();
  shade = by;
  scales = {};
  for (const block of blocks()) {
    if (block.inView) paint(block);
    else delete block.dataset.by;
  }
  legend();
  performance.measure("recolour", {start});
}

const figures = value => (value == null ? "–" : String(+value.toPrecision(6)));

/** Show everything known of a token at the side. */
function inspect(span) {
  const block = span.parentElement, data = values.get(block), place = $("#inspector");
  if (!data || !place) return;
  const i = [...block.children].indexOf(span), logp = at(data.logp, i), list = make("dl");
  const row = (name, value) => list.append(make("dt", name), make("dd", value));
  const meter = make("meter");
  meter.value = logp == null ? 0 : Math.exp(logp);
  meter.setAttribute("aria-label", "probability");
  row("probability", figures(logp == null ? null : Math.exp(logp)));
  row("log-prob", figures(logp));
  for (const name of ["advantage", "psi", "weight", "gate"]) row(name === "psi" ? "psi ψ" : name, figures(at(data[name], i)));
  data.baseline.forEach((one, n) => row(data.baseline.length > 1 ? `baseline ${n + 1}` : "baseline", figures(at(one, i))));
  row("token id", data.ids[i]);
  row("call, token", `${block.dataset.call}, ${i}`);
  const text = data.text[i] === "" ? "part of the next character" : data.text[i].replace(/\n/g, "↵").replace(/ /g, "␣");
  const close = make("button", "×", "close");
  close.setAttribute("aria-label", "close");
  place.replaceChildren(close, make("span", text, "token"), meter, list);
  if (data.advantage.length && at(data.advantage, i) == null) place.append(make("p", "not in the loss", "cut"));
}

function hold(span, scroll) {
  held?.classList.remove("on");
  held = span;
  if (!span) return;
  span.classList.add("on");
  inspect(span);
  if (scroll) span.scrollIntoView({block: "center"});
  const block = span.parentElement, i = [...block.children].indexOf(span);
  if (!exported) history.replaceState(null, "", `#call-${block.dataset.call}.${i}`);
}

/** A link such as #call-7.123 leads to a token; the call may be on another page of the rollout. */
async function openHash() {
  const found = /^#call-(\d+)(?:\.(\d+))?$/.exec(location.hash);
  if (!found) return;
  if (!document.getElementById(`call-${found[1]}`)) {
    const url = new URL(location.href), known = +($(".rollout")?.dataset.calls ?? 0);
    if (exported || +found[1] >= known || url.searchParams.get("call") === found[1]) return;
    url.searchParams.set("call", found[1]);
    location.replace(url);
    return;
  }
  if (found[2] === undefined) return;
  const block = $(`.tokens[data-call="${found[1]}"]`);
  if (!block) return;
  block.scrollIntoView({block: "center"});
  await load([block]);
  block.inView = true;
  paint(block);
  const span = block.children[+found[2]];
  if (span) {
    hold(span, true);
    block.focus({preventScroll: true});
  }
}

document.addEventListener("mouseover", event => {
  const span = event.target.closest?.(".tokens span");
  if (span) inspect(span);
  else if (held && event.target.closest?.(".talk")) inspect(held);
});
document.addEventListener("click", event => {
  const span = event.target.closest?.(".tokens span");
  if (span) hold(span === held ? null : span, false);
  if (event.target.matches?.("#inspector .close")) {
    hold(null);
    $("#inspector").replaceChildren(make("p", "Point at a token, or move through a call with the arrow keys.", "empty"));
  }
});
document.addEventListener("change", event => { if (event.target.name === "by") shadeBy(event.target.value); });

// -- a page that takes seconds: its link says so ---------------------------------------------------
addEventListener("pageshow", () => $$("a[data-wait][aria-busy]").forEach(link => { link.textContent = link.dataset.text; link.ariaBusy = null; }));
document.addEventListener("click", event => {
  const link = event.target.closest?.("a[data-wait]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  Object.assign(link.dataset, {text: link.textContent});
  link.textContent = link.dataset.wait;
  link.ariaBusy = "true";
});

// -- images: a click shows one in full size; without this file its link opens it -------------------
function enlarge(image) {
  const place = make("dialog", undefined, "picture"), shown = make("img"), bar = make("div", undefined, "bar");
  const whole = make("button", "Actual size", "whole"), close = make("button", "Close");
  place.setAttribute("aria-label", image.alt);
  shown.alt = image.alt;
  shown.className = image.className;
  const {naturalWidth, naturalHeight} = image, times = Math.floor(Math.min(480, innerWidth - 80) / Math.max(naturalWidth, naturalHeight));
  const wide = naturalWidth * (image.className ? Math.max(1, times) : 1); // a small one is enlarged
  shown.width = wide;
  shown.src = image.src;
  whole.setAttribute("aria-pressed", "false");
  whole.onclick = () => whole.setAttribute("aria-pressed", String(place.classList.toggle("all")));
  close.onclick = () => place.close();
  place.onclick = event => { if (event.target === place) place.close(); };
  place.onclose = () => place.remove();
  bar.append(make("span", image.alt), whole, close);
  place.append(bar, shown);
  document.body.append(place);
  place.showModal();
  whole.hidden = wide <= shown.clientWidth + 1;
  close.focus();
}
document.addEventListener("click", event => {
  const image = $("img", event.target.closest?.(".shot") ?? make("i"));
  if (!image || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  enlarge(image);
});
const lost = (shot, why) => shot.replaceWith(make("p", `${$("img", shot).alt}: ${why}`, "cut"));
document.addEventListener("error", event => {
  const shot = event.target.closest?.(".shot");
  if (shot) lost(shot, "the file is not stored, or this browser cannot decode it");
}, true);

/** Give the images of an exported page their files. */
function showImages() {
  for (const image of $$("img[data-image]")) {
    const file = $(`#image-${image.dataset.image}`);
    if (file) image.src = file.textContent;
    else lost(image.parentElement, `not in this file: ${json($("#no-image"))}`);
  }
}

// -- keys -----------------------------------------------------------------------------------------
function move(steps) {
  const block = document.activeElement, span = held?.parentElement === block ? held : null;
  const next = span ? (steps > 0 ? span.nextElementSibling : span.previousElementSibling) : block.firstElementChild;
  if (next) hold(next, false);
  next?.scrollIntoView({block: "nearest"});
}

function nextCall(steps) {
  const calls = $$(".call"), now = calls.findIndex(call => call.getBoundingClientRect().bottom > 140);
  const block = $(".tokens", calls[Math.max(0, Math.min(calls.length - 1, (now < 0 ? calls.length - 1 : now) + steps))] ?? document);
  block?.closest(".call").scrollIntoView({block: "start"});
  block?.focus({preventScroll: true});
}

const KEYS = {
  j: () => $(".siblings [aria-current]")?.nextElementSibling?.click(),
  k: () => $(".siblings [aria-current]")?.previousElementSibling?.click(),
  n: () => nextCall(1),
  p: () => nextCall(-1),
  c: () => {
    const all = $$("#paint input"), next = all[(all.findIndex(one => one.checked) + 1) % all.length];
    if (next) { next.checked = true; shadeBy(next.value); }
  },
  "/": () => ($("#text") ? $("#text").focus() : document.body.dataset.run && visit(`${base}/find/${path(document.body.dataset.run)}`)),
  "?": () => $("#help").showModal(),
  Escape: () => hold(null),
};
document.addEventListener("keydown", event => {
  const typing = event.target.matches?.("input:not([type=radio]), select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const inTokens = document.activeElement?.classList.contains("tokens");
  if (inTokens && (event.key === "ArrowRight" || event.key === "ArrowLeft")) move(event.key === "ArrowRight" ? 1 : -1);
  else if (KEYS[event.key] && !$("dialog[open]")) KEYS[event.key]();
  else return;
  event.preventDefault();
});
$("#help-open")?.addEventListener("click", KEYS["?"]);

// -- live: of all tabs one holds the event stream and tells the others (a browser opens six
// connections to a server and no more); a hidden tab asks for nothing until it is seen -----------
function follow() {
  const status = $("#live"), channel = new BroadcastChannel("agentrl-live");
  let busy = false, missed = false;
  const say = text => {
    status.textContent = text;
    status.classList.toggle("on", text === "live");
  };
  async function refresh() {
    if (busy || document.hidden) { missed = true; return; }
    busy = true;
    missed = false;
    try {
      const url = new URL(location.href);
      url.searchParams.set("live", "1");
      const [answer] = await Promise.all([fetch(url), extendCharts()]);
      if (answer.ok) replaceParts(new DOMParser().parseFromString(await answer.text(), "text/html"));
      say("live");
    } catch { say("offline, trying again"); } finally { busy = false; }
    if (missed && !document.hidden) refresh();
  }
  const hear = what => (what === "change" ? refresh() : say(what));
  channel.onmessage = event => hear(event.data);
  document.addEventListener("visibilitychange", () => { if (!document.hidden && missed) refresh(); });
  const tell = what => { channel.postMessage(what); hear(what); };
  say("live");
  navigator.locks.request("agentrl-live", () => new Promise(() => {
    const source = new EventSource("/events");
    source.addEventListener("hello", () => tell("live"));
    source.addEventListener("change", () => tell("change"));
    source.addEventListener("lost", event => tell(event.data));
    source.onerror = () => tell("offline, trying again");
  }));
}

/** Put the parts that can change in the place of those shown; what has focus stays. */
function replaceParts(fresh) {
  for (const old of $$("[data-live]")) {
    const next = $(`[data-live="${old.dataset.live}"]`, fresh);
    if (!next) continue;
    if (old.dataset.live === "calls") {
      for (const call of $$(".call", next).slice($$(".call", old).length)) {
        old.append(document.adoptNode(call));
        for (const block of $$(".tokens", call)) seen.observe(block);
      }
    } else if (old.innerHTML !== next.innerHTML && !old.contains(document.activeElement)) {
      old.replaceWith(document.adoptNode(next));
    }
  }
}

// -- an exported run: pages are unpacked from the file when they are opened ----------------------
const chunks = new Map();
const visit = url => (exported ? (location.hash = url) : (location.href = url));

async function unpack(n) {
  if (!chunks.has(n)) {
    const bytes = Uint8Array.from(atob($(`#chunk-${n}`).textContent), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    chunks.set(n, JSON.parse(await new Response(stream).text()));
  }
  return chunks.get(n);
}

/** The key of a page: a long rollout has one for some calls each, which any of their links opens. */
function pageOf(index, url, hash) {
  const bare = url.split("?")[0], size = +document.body.dataset.calls;
  const call = /[?&]call=(\d+)/.exec(url)?.[1] ?? /^call-(\d+)/.exec(hash ?? "")?.[1] ?? 0;
  const part = `${bare}?call=${Math.floor(call / size) * size}`;
  return index[part] === undefined ? bare : part;
}

async function openPage() {
  const index = json($("#index")), main = $("#main");
  const [url, hash] = decodeURIComponent(location.hash.slice(1) || `/run/${document.body.dataset.run}`).split("#");
  const bare = pageOf(index, url, hash);
  main.replaceChildren();
  if (index[bare] === undefined) {
    main.append(make("h1", "Not in this file"), make("p", `${bare} was not exported.`, "empty"));
  } else {
    const page = new DOMParser().parseFromString((await unpack(index[bare]))[bare], "text/html");
    for (const child of [...page.body.childNodes]) main.append(document.adoptNode(child));
  }
  showImages();
  drawAll();
  watchTokens();
  if (hash) document.getElementById(hash)?.scrollIntoView();
  else scrollTo(0, 0);
  main.focus();
}

if (exported) {
  addEventListener("hashchange", openPage);
  document.addEventListener("click", event => {
    const link = event.target.closest?.("a[href]"), href = link?.getAttribute("href");
    if (!href) return;
    if (href.startsWith("#")) document.getElementById(href.slice(1))?.scrollIntoView();
    else location.hash = href;
    event.preventDefault();
  });
  openPage();
} else {
  drawAll();
  watchTokens();
  addEventListener("hashchange", openHash);
  if ($("[data-live]") && window.EventSource && navigator.locks) follow();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [figure, chart] of charts) draw(figure, chart.lines, chart.labels);
});
addEventListener("resize", () => charts.forEach((chart, figure) =>
  chart.plot.setSize({width: $(".plot", figure).clientWidth, height: chart.plot.height})));
