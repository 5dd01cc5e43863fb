// The timeline: a row for each rank, a bar for each call. Texts from dumps are only ever set as text.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const ROW = data.ranks.length > 60 ? 17 : 22, AXIS = 26, GUTTER = 92, MIN_SPAN_S = 2e-6;
const STATES = ["not ended", "completed", "failed"];
const canvas = $("canvas"), frame = $("frame"), pen = canvas.getContext("2d");
let view = { from: 0, to: 1 }, rows = [], width = 0, height = 0, pointed = null, picked = null, drawing = 0;
const wanted = { ranks: null, group: "", operation: "", state: "", colour: "operation" };

// ---- the data ----
function column(text, Type) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  if (!data.isLittle && Type.BYTES_PER_ELEMENT > 1) {
    const size = Type.BYTES_PER_ELEMENT;
    for (let i = 0; i < bytes.length; i += size) bytes.subarray(i, i + size).reverse();
  }
  return new Type(bytes.buffer);
}
function lanesOf(rank) {
  // Calls that are under way together lie above each other, in four lanes at most.
  const lanes = new Uint8Array(rank.num), until = [-Infinity];
  for (let i = 0; i < rank.num; i++) {
    let lane = until.findIndex((end) => end <= rank.begun[i] + 1e-9);
    if (lane < 0) lane = until.length < 4 ? until.push(0) - 1 : until.indexOf(Math.min(...until));
    until[lane] = rank.begun[i] + rank.lasted[i];
    lanes[i] = lane;
  }
  rank.numLanes = until.length;
  return lanes;
}
const known = new Map();
for (const rank of data.ranks) {
  for (const [name, Type] of [["begun", Float64Array], ["lasted", Float32Array], ["site", Uint32Array], ["sequence", Uint32Array], ["label", Uint32Array], ["state", Uint8Array]]) rank[name] = column(rank[name], Type);
  rank.num = rank.begun.length;
  rank.lanes = lanesOf(rank);
  // The latest end so far: where to begin looking for bars that reach into the view.
  rank.reach = new Float64Array(rank.num);
  for (let i = 0, far = -Infinity; i < rank.num; i++) rank.reach[i] = far = Math.max(far, rank.begun[i] + rank.lasted[i]);
  known.set(rank.rank, rank);
}
const worldRows = [...data.ranks, ...data.withoutDump.map((rank) => ({ rank, num: 0, isMissing: true, blamed: data.blamed.includes(rank) }))].sort((a, b) => a.rank - b.rank);
const lastS = Math.max(1e-3, ...data.ranks.map((rank) => rank.end), ...data.ranks.map((rank) => rank.num ? rank.reach[rank.num - 1] : 0));
const siteGroup = (site) => data.sites[site][0], siteOperation = (site) => data.sites[site][1];
const isMessage = (site) => siteOperation(site) === "send" || siteOperation(site) === "recv";
const groupName = (group) => data.groups[group].name + (data.groups[group].axis ? ` (${data.groups[group].axis})` : "");
const hangS = (() => {
  let first = Infinity;
  for (const rank of data.ranks) for (let i = rank.num - 1; i >= 0 && i > rank.num - 64; i--) if (rank.state[i] !== 1) first = Math.min(first, rank.begun[i]);
  return first;
})();

// ---- colours ----
const HUES = [212, 152, 32, 272, 186, 334, 92, 240, 12, 56, 300, 120];
let look = {};
function readLook() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "sheet", "ink", "soft", "line", "quiet", "bad", "good", "empty", "light", "waits", "alarm"]) look[name] = style.getPropertyValue(`--${name}`).trim();
}
const operations = [...new Set(data.sites.map((site) => site[1]))].sort();
function hueOf(place) { return `hsl(${HUES[place % HUES.length]} ${place < HUES.length ? 44 : 26}% ${look.light})`; }
function classOf(rank, i) {
  if (wanted.colour === "state") return rank.state[i];
  return wanted.colour === "group" ? siteGroup(rank.site[i]) : operationPlace[rank.site[i]];
}
const operationPlace = data.sites.map((site) => operations.indexOf(site[1]));
function colourOf(kind) {
  if (wanted.colour === "state") return [look.waits, hueOf(0), look.bad][kind];
  return hueOf(kind);
}
function tint(rank, i) { return rank.state[i] === 1 ? colourOf(classOf(rank, i)) : rank.state[i] === 0 ? look.waits : look.bad; }
function legend() {
  const counts = new Map();
  for (const rank of rows) for (let i = 0; i < rank.num; i++) if (isShown(rank, i)) { const kind = classOf(rank, i); counts.set(kind, (counts.get(kind) || 0) + 1); }
  const parts = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([kind, count]) => {
    const name = wanted.colour === "state" ? STATES[kind] : wanted.colour === "group" ? groupName(kind) : operations[kind];
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = colourOf(kind);
    item.append(swatch, `${name} ${count.toLocaleString("en")}`);
    return item;
  });
  for (const [name, colour] of wanted.colour === "state" ? [] : [["not ended", look.waits], ["failed", look.bad]]) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = `repeating-linear-gradient(45deg, ${colour} 0 3px, ${look.sheet} 3px 5px)`;
    item.append(swatch, name);
    parts.push(item);
  }
  $("legend").replaceChildren(...parts);
}

// ---- what is shown ----
function isShown(rank, i) {
  const site = rank.site[i];
  return (wanted.group === "" || siteGroup(site) === +wanted.group) && (wanted.operation === "" || siteOperation(site) === wanted.operation) && (wanted.state === "" || rank.state[i] === +wanted.state);
}
function ranksIn(text) {
  const ranks = new Set();
  for (const part of text.split(/[\s,]+/).filter(Boolean)) {
    const [first, last] = part.split("-").map(Number), end = last === undefined ? first : last;
    if (!Number.isInteger(first) || !Number.isInteger(end)) continue;
    for (const row of worldRows) if (row.rank >= first && row.rank <= end) ranks.add(row.rank);
  }
  return ranks.size ? ranks : null;
}
function refilter() {
  rows = worldRows.filter((row) => wanted.ranks === null || wanted.ranks.has(row.rank));
  for (const card of document.querySelectorAll(".card")) card.hidden = wanted.ranks !== null && !card.dataset.ranks.split(" ").some((rank) => wanted.ranks.has(+rank));
  legend();
  resize();
}
function resize() {
  const room = Math.max(160, Math.min(AXIS + rows.length * ROW + 6, Math.round(innerHeight * 0.66)));
  frame.style.height = `${room + 2}px`;
  $("rows").style.height = `${AXIS + rows.length * ROW + 6}px`;
  width = frame.clientWidth; height = room;
  canvas.width = Math.round(width * devicePixelRatio); canvas.height = Math.round(height * devicePixelRatio);
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  redraw();
}
function show(from, to) {
  const span = Math.min(Math.max(to - from, MIN_SPAN_S), lastS * 1.1), start = Math.min(Math.max(from, -lastS * 0.05), lastS * 1.05 - span);
  view = { from: start, to: start + span };
  redraw();
}
function zoom(factor, at = (view.from + view.to) / 2) { show(at - (at - view.from) * factor, at + (view.to - at) * factor); }
const showAll = () => show(-lastS * 0.01, lastS * 1.01);
function showHang() { const long = lastS - hangS; return hangS < Infinity ? show(Math.max(-lastS * 0.01, hangS - long * 0.4), lastS + long * 0.03) : showAll(); }
function showBefore() {
  // The last calls that ended, some two dozen of them on a rank.
  const until = hangS < Infinity ? hangS : lastS, starts = [];
  for (const rank of data.ranks) {
    let i = rank.num - 1;
    while (i >= 0 && rank.begun[i] >= until) i--;
    if (i >= 0) starts.push(rank.begun[Math.max(0, i - 24)]);
  }
  starts.sort((a, b) => a - b);
  const from = starts.length ? starts[starts.length >> 1] : 0;
  show(from, until + Math.max((until - from) * 0.25, 1e-5));
}
const xOf = (s) => GUTTER + (s - view.from) / (view.to - view.from) * (width - GUTTER - 8);
const secondsAt = (x) => view.from + (x - GUTTER) / (width - GUTTER - 8) * (view.to - view.from);

// ---- drawing ----
function redraw() { if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; draw(); }); }
function timeText(s, step) {
  if (step >= 1 || Math.abs(s) >= 1) return `${s.toFixed(Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)))} s`;
  return step >= 1e-3 ? `${+(s * 1e3).toFixed(1)} ms` : `${+(s * 1e6).toFixed(1)} \u00b5s`;
}
function long(s) { return s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${(s * 1e6).toFixed(0)} \u00b5s`; }
function hatch() {
  const tile = document.createElement("canvas"); tile.width = tile.height = 6;
  const brush = tile.getContext("2d"); brush.strokeStyle = look.sheet; brush.lineWidth = 1.4; brush.globalAlpha = 0.75;
  brush.beginPath(); brush.moveTo(-1, 7); brush.lineTo(7, -1); brush.moveTo(-1, 1); brush.lineTo(1, -1); brush.moveTo(5, 7); brush.lineTo(7, 5); brush.stroke();
  return pen.createPattern(tile, "repeat");
}
let stripes = null;
function axis() {
  const span = view.to - view.from, rough = span / Math.max(3, (width - GUTTER) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  pen.fillStyle = look.soft; pen.strokeStyle = look.line; pen.textAlign = "center";
  // Within milliseconds of a long job, times since its start tell little: then they count from the view's first line.
  const base = step < 0.01 && Math.abs(view.from) > 1000 * step ? Math.ceil(view.from / step) * step : 0;
  for (let s = Math.ceil(view.from / step) * step; s <= view.to; s += step) {
    const x = Math.round(xOf(s)) + 0.5;
    pen.beginPath(); pen.moveTo(x, AXIS - 4); pen.lineTo(x, height); pen.stroke();
    const isBase = base && Math.abs(s - base) < step / 2;
    pen.fillText(isBase ? `${base.toFixed(4)} s` : (base ? "+" : "") + timeText(s - base, step), x, 13);
  }
}
function firstIn(rank, s) {
  let low = 0, high = rank.num;
  while (low < high) { const middle = (low + high) >> 1; if (rank.reach[middle] < s) low = middle + 1; else high = middle; }
  return low;
}
function isLike(rank, i, other) {
  if (!other) return false;
  const [a, b] = [data.sites[rank.site[i]], data.sites[other.rank.site[other.i]]];
  if (a[0] !== b[0] || rank.sequence[i] !== other.rank.sequence[other.i]) return false;
  if (!isMessage(rank.site[i]) && !isMessage(other.rank.site[other.i])) return true;
  return rank === other.rank ? i === other.i : isMessage(rank.site[i]) && a[1] !== b[1] && a[3] === other.rank.rank && b[3] === rank.rank;
}
function draw() {
  const scroll = frame.scrollTop, dpr = devicePixelRatio;
  pen.setTransform(dpr, 0, 0, dpr, 0, 0);
  pen.fillStyle = look.sheet; pen.fillRect(0, 0, width, height);
  pen.font = "11.5px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"; pen.textBaseline = "middle";
  axis();
  stripes = hatch();
  const first = Math.max(0, Math.floor(scroll / ROW)), last = Math.min(rows.length, Math.ceil((scroll + height - AXIS) / ROW) + 1);
  pen.save(); pen.beginPath(); pen.rect(0, AXIS, width, height - AXIS); pen.clip();
  for (let place = first; place < last; place++) drawRow(rows[place], AXIS + place * ROW - scroll);
  pen.restore();
}
function drawRow(rank, y) {
  const [top, size] = [y + 2, ROW - 4];
  pen.textAlign = "right"; pen.fillStyle = rank.blamed ? look.bad : look.soft;
  pen.fillText(`rank ${rank.rank}`, GUTTER - 14, y + ROW / 2);
  if (rank.blamed) { pen.beginPath(); pen.arc(12, y + ROW / 2, 4, 0, 7); pen.fill(); }
  if (rank.isMissing) {
    pen.textAlign = "left"; pen.fillText("no dump", GUTTER + 6, y + ROW / 2);
    return;
  }
  pen.save(); pen.beginPath(); pen.rect(GUTTER, y, width - GUTTER, ROW); pen.clip();
  const begin = rank.num ? rank.begun[0] : 0, ground = Math.max(GUTTER, xOf(begin));
  pen.fillStyle = look.empty; pen.fillRect(ground, top + size / 2 - 1, Math.max(0, xOf(rank.end) - ground), 2);
  if (rank.blamed) silence(rank, top, size);
  const covered = [-1, -1, -1, -1], bar = size / rank.numLanes, like = pointed || picked, marked = [];
  const isFiltered = wanted.group !== "" || wanted.operation !== "" || wanted.state !== "";
  for (let i = firstIn(rank, view.from); i < rank.num && rank.begun[i] <= view.to; i++) {
    if (isFiltered && !isShown(rank, i)) continue;
    const lane = rank.lanes[i], from = Math.max(GUTTER - 2, xOf(rank.begun[i])), to = Math.min(width + 2, xOf(rank.begun[i] + rank.lasted[i]));
    const box = [from, top + lane * bar, Math.max(to - from - (to - from > 4 ? 1 : 0), 1.2), Math.max(bar - (rank.numLanes > 1 ? 1 : 0), 1.5)];
    if (like && isLike(rank, i, like)) marked.push(box);
    // What would lie within one pixel of what is there already is not drawn.
    if (to <= covered[lane] + 0.4 && rank.state[i] === 1) continue;
    covered[lane] = Math.max(covered[lane], Math.max(to, from + 1.2));
    pen.fillStyle = tint(rank, i);
    pen.globalAlpha = rank.state[i] === 0 ? 0.5 : 1;
    pen.fillRect(...box);
    pen.globalAlpha = 1;
    if (rank.state[i] !== 1) { pen.fillStyle = stripes; pen.fillRect(...box); }
    if (to - from > 90 && bar > 10) name(rank, i, box);
  }
  pen.strokeStyle = look.ink; pen.lineWidth = 1.5;
  for (const box of marked) pen.strokeRect(box[0] + 0.5, box[1], Math.max(box[2] - 1, 2), box[3]);
  pen.lineWidth = 1;
  pen.restore();
}
function silence(rank, top, size) {
  // Since when a rank to blame has called nothing, and where it is.
  const last = rank.num ? rank.reach[rank.num - 1] : rank.end;
  if (rank.num && rank.state[rank.num - 1] !== 1 || rank.end - last < 0.02 * (view.to - view.from)) return;
  const from = Math.max(GUTTER, xOf(last) + 1), to = Math.min(width, xOf(rank.end));
  if (to <= from) return;
  pen.fillStyle = look.alarm; pen.fillRect(from, top, to - from, size);
  pen.fillStyle = look.bad; pen.fillRect(from, top + size - 2, to - from, 2);
  if (rank.where && pen.measureText(rank.where).width < to - from - 16) { pen.textAlign = "left"; pen.fillText(rank.where, from + 8, top + size / 2); }
}
function name(rank, i, box) {
  const text = `${siteOperation(rank.site[i])} #${rank.sequence[i]}`, room = Math.min(box[0] + box[2], width) - Math.max(box[0], GUTTER) - 10;
  const long = pen.measureText(text).width;
  if (long > room) return;
  const x = Math.max(box[0], GUTTER) + 5;
  if (rank.state[i] !== 1) { pen.fillStyle = look.sheet; pen.fillRect(x - 3, box[1] + 2, long + 6, box[3] - 4); }
  pen.fillStyle = rank.state[i] !== 1 ? look.ink : "#fff"; pen.textAlign = "left"; pen.fillText(text, x, box[1] + box[3] / 2 + 0.5);
}

// ---- pointing ----
function callAt(x, y) {
  const rank = rows[Math.floor((y - AXIS + frame.scrollTop) / ROW)];
  if (!rank || rank.isMissing || x < GUTTER || y < AXIS) return null;
  const within = (y - AXIS + frame.scrollTop) % ROW - 2, lane = Math.min(rank.numLanes - 1, Math.max(0, Math.floor(within / ((ROW - 4) / rank.numLanes))));
  const s = secondsAt(x), slack = 3 / (width - GUTTER) * (view.to - view.from);
  let found = null, best = slack;
  for (let i = firstIn(rank, s - slack); i < rank.num && rank.begun[i] <= s + slack; i++) {
    if (rank.lanes[i] !== lane || !isShown(rank, i)) continue;
    const off = Math.max(rank.begun[i] - s, s - rank.begun[i] - rank.lasted[i], 0);
    if (off < best || (off === 0 && best === 0)) { best = off; found = { rank, i }; }
  }
  return found;
}
function entry(list, term, text, kind) {
  if (!text) return;
  const dt = document.createElement("dt"), dd = document.createElement("dd");
  dt.textContent = term; dd.textContent = text; if (kind) dd.className = kind;
  list.append(dt, dd);
}
function described({ rank, i }, isPicked) {
  const [group, operation, tensors, peer, stack] = data.sites[rank.site[i]], [action, module] = data.labels[rank.label[i]];
  const title = document.createElement("div"), swatch = document.createElement("i"), list = document.createElement("dl");
  title.className = "call"; swatch.style.background = tint(rank, i);
  title.append(swatch, `rank ${rank.rank}: ${operation} #${rank.sequence[i]}`);
  entry(list, "group", `${groupName(group)}, ${data.groups[group].ranks} ranks`);
  entry(list, operation === "send" ? "to" : operation === "recv" ? "from" : "root", peer === null ? "" : `rank ${peer}`);
  entry(list, "tensors", tensors);
  entry(list, "for", [action, module].filter(Boolean).join(", "));
  entry(list, "state", `${STATES[rank.state[i]]}${rank.state[i] === 0 ? " when this rank was last heard of" : ""}, ${long(rank.lasted[i])}`, rank.state[i] === 1 ? "" : "wrong");
  entry(list, "error", rank.errors[i], "wrong");
  entry(list, "began", `${rank.begun[i].toFixed(6)} s; ${new Date((data.startS + rank.begun[i]) * 1e3).toISOString().replace("T", " ").slice(0, 23)} UTC`);
  entry(list, "where", `${rank.host}, process ${rank.pid}`);
  const frames = data.stacks[stack].map((place) => data.frames[place]), own = frames.filter((line) => line[3] === 0);
  entry(list, "line", (isPicked ? frames : (own.length ? own : frames).slice(0, 3)).map(([file, line, name]) => `${isPicked ? file : file.split("/").pop()}:${line} in ${name}`).join(" \u2039 "));
  if (isPicked && !isMessage(rank.site[i])) others(list, rank, i);
  return [title, list];
}
function others(list, rank, i) {
  const came = [];
  for (const other of data.ranks) for (let k = 0; k < other.num; k++) if (isLike(other, k, { rank, i })) { came.push({ other, k }); break; }
  if (!came.length) return;
  came.sort((a, b) => a.other.begun[a.k] - b.other.begun[b.k]);
  const begun = ({ other, k }) => other.begun[k], last = came[came.length - 1];
  entry(list, "on record", `on ${came.length} of ${data.groups[siteGroup(rank.site[i])].ranks} ranks; rank ${came[0].other.rank} came first, rank ${last.other.rank} last, ${long(begun(last) - begun(came[0]))} later`);
}
function point(event) {
  const at = canvas.getBoundingClientRect(), found = callAt(event.clientX - at.left, event.clientY - at.top), tip = $("tip");
  if (found) {
    tip.replaceChildren(...described(found, false)); tip.hidden = false;
    const room = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 16, innerWidth - room.width - 8))}px`;
    tip.style.top = `${event.clientY + 20 + room.height > innerHeight ? Math.max(8, event.clientY - room.height - 14) : event.clientY + 20}px`;
  } else tip.hidden = true;
  if ((found && found.i) !== (pointed && pointed.i) || (found && found.rank) !== (pointed && pointed.rank)) { pointed = found; redraw(); }
}
let drag = null;
canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, y: event.clientY, ...view, scroll: frame.scrollTop, moved: false }; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return point(event);
  const dx = event.clientX - drag.x;
  if (Math.abs(dx) + Math.abs(event.clientY - drag.y) > 3) drag.moved = true;
  if (!drag.moved) return;
  $("tip").hidden = true; canvas.classList.add("moves");
  const by = dx / (width - GUTTER) * (drag.to - drag.from);
  frame.scrollTop = drag.scroll - (event.clientY - drag.y);
  show(drag.from - by, drag.to - by);
});
canvas.addEventListener("pointerup", (event) => {
  const wasClick = drag && !drag.moved, at = canvas.getBoundingClientRect();
  drag = null; canvas.classList.remove("moves");
  if (!wasClick) return;
  picked = callAt(event.clientX - at.left, event.clientY - at.top);
  $("picked").hidden = !picked;
  if (picked) $("picked").replaceChildren(...described(picked, true));
  redraw();
});
canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; if (pointed) { pointed = null; redraw(); } });
canvas.addEventListener("dblclick", (event) => zoom(0.35, secondsAt(event.clientX - canvas.getBoundingClientRect().left)));
frame.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) { event.preventDefault(); zoom(Math.exp(event.deltaY * 0.0025), secondsAt(event.clientX - canvas.getBoundingClientRect().left)); }
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); const by = (event.deltaX || event.deltaY) / width * (view.to - view.from); show(view.from + by, view.to + by); }
}, { passive: false });
frame.addEventListener("scroll", redraw);
frame.addEventListener("keydown", (event) => {
  const by = (view.to - view.from) * 0.2;
  const act = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.7), "0": showAll, h: showHang, b: showBefore, ArrowLeft: () => show(view.from - by, view.to - by), ArrowRight: () => show(view.from + by, view.to + by) }[event.key];
  if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
});
for (const [id, act] of [["z-all", showAll], ["z-hang", showHang], ["z-before", showBefore], ["z-in", () => zoom(0.5)], ["z-out", () => zoom(2)]]) $(id).addEventListener("click", act);

// ---- filters, theme, start ----
function option(select, value, text) { const item = document.createElement("option"); item.value = value; item.textContent = text; select.append(item); }
data.groups.forEach((_, group) => option($("f-group"), group, groupName(group)));
operations.forEach((operation) => option($("f-operation"), operation, operation));
for (const key of ["group", "operation", "state", "colour"]) $(`f-${key}`).addEventListener("change", (event) => { wanted[key] = event.target.value; refilter(); });
$("f-ranks").addEventListener("input", (event) => { wanted.ranks = ranksIn(event.target.value); frame.scrollTop = 0; refilter(); });
$("filters").addEventListener("submit", (event) => event.preventDefault());
function repaint() { readLook(); legend(); redraw(); }
$("theme").addEventListener("click", () => {
  const root = document.documentElement, isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("resize", resize);
const noClock = data.ranks.filter((rank) => !rank.hasClock).length, errors = data.ranks.map((rank) => rank.clockError || 0), leftOut = data.ranks.reduce((sum, rank) => sum + rank.leftOut, 0);
$("clock").textContent = [data.ranks.length > 1 ? noClock ? `${noClock} ranks do not know how far their clocks are from rank 0's: they are drawn as they are.` : `Clocks agree to within ${long(Math.max(0, ...errors))}.` : "", leftOut ? `${leftOut.toLocaleString("en")} older records are left out.` : ""].join(" ");
if (!data.ranks.length) $("time").hidden = true;
readLook();
refilter();
showHang();
// A blamed rank far down is brought into view.
const blamedRow = rows.findIndex((row) => row.blamed);
if (blamedRow * ROW > height - 3 * ROW) frame.scrollTop = (blamedRow - 4) * ROW;
})();
