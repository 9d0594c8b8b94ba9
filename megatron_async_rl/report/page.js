"use strict";
// Script of the report and of the dashboard. It draws the panels that panel.py describes as SVG. In the
// dashboard, it also requests new states and samples from the server.
//
// Invariant: text of a run is inserted as text, never as HTML, except for parts that the server has escaped.

const LINES = {line: "", dotted: "1.5 3", dashed: "5 4"};
const FEW = 30, MARGIN = {left: 46, right: 12, top: 12, bottom: 34}, TRACK = 24, DIGIT = 7;

function make(name, attributes = {}, ...children) {
  const drawn = ["svg", "g", "path", "line", "text", "rect"].includes(name);
  const node = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const colour = name => `var(--${name})`;
const isNumber = value => typeof value === "number";

function short(value, digits = 4) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(digits - 3).replace(/\.?0*e/, "e").replace("+", "");
  return Math.abs(value) < 1000 ? String(+value.toPrecision(digits)) : Math.round(value).toLocaleString("en");
}

// Labels with the smallest number of digits that distinguishes the ticks of an axis.
function labels(values, percent) {
  for (let digits = 4; ; digits++) {
    const found = values.map(value => percent ? `${+(100 * value).toPrecision(digits)}%` : short(value, digits));
    if (digits === 12 || new Set(found).size === found.length) return found;
  }
}

function exact(value, form) {
  if (!isNumber(value)) return "–";
  if (form === "share") return (100 * value).toFixed(1) + " %";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

// Scales of the axes

function ticks(low, high, limit, whole) {
  const raw = (high - low) / limit, power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 2.5, 5, 10].map(one => one * power).find(one => one >= raw * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++)
    for (const one of high - low > 2 ? [1] : [1, 2, 5]) {
      const at = power + Math.log10(one);
      if (at >= low && at <= high) found.push(one * 10 ** power);
    }
  return found.length > 6 ? found.filter((_, i) => i % Math.ceil(found.length / 6) === 0) : found;
}

function xRange(panel) {
  if (panel.range) return panel.range;
  if (panel.kind === "columns") return [-0.6, Math.max(1, panel.names.length) - 0.4];
  let low = Infinity, high = -Infinity;
  for (const curve of panel.curves) for (const xs of [curve.x, curve.trend ? curve.trend[0] : []]) for (const x of xs) {
    low = Math.min(low, x); high = Math.max(high, x);
  }
  for (const [, , start, end] of panel.cells) { low = Math.min(low, start); high = Math.max(high, end); }
  if (low > high) return [0, 1];
  const margin = Math.max(panel.kind === "lines" && high > 1e4 ? 0 : 0.5, 0.015 * (high - low));
  return [low - margin, high + margin];
}

function yRange(panel, curves) {
  const lift = panel.log ? value => value > 0 ? Math.log10(value) : null : value => value;
  let low = Infinity, high = -Infinity;
  const include = value => { if (isNumber(value) && isNumber(value = lift(value))) { low = Math.min(low, value); high = Math.max(high, value); } };
  if (panel.kind === "stack") (curves[0] || {x: []}).x.forEach((_, i) => include(curves.reduce((sum, one) => sum + (one.y[i] || 0), 0)));
  else for (const curve of curves) { curve.y.forEach(include); if (curve.trend) curve.trend[1].forEach(include); }
  for (const [value] of panel.levels) include(value);
  if (low > high) [low, high] = [0, 1];
  const margin = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 0.5;
  if (panel.kind === "columns" || panel.kind === "stack") low = Math.min(0, low);
  let range = [panel.low !== null && !panel.log ? panel.low : low - margin, panel.high !== null ? panel.high : high + margin];
  if (panel.form === "whole" && panel.high === null) range = [-0.2, Math.max(1, high) + 0.2];
  return range[1] > range[0] ? range : [range[0], range[0] + 1];
}

// Drawing

function path(xs, ys, x, y) {
  let text = "", drawing = false;
  xs.forEach((at, i) => {
    const value = isNumber(ys[i]) ? y(ys[i]) : null;
    if (value === null || !isFinite(value)) { drawing = false; return; }
    text += (drawing ? "L" : "M") + x(at).toFixed(1) + " " + value.toFixed(1);
    drawing = true;
  });
  return text;
}

function points(curve, x, y, shape) {
  return curve.x.map((at, i) => {
    const value = isNumber(curve.y[i]) ? y(curve.y[i]) : NaN;
    return isFinite(value) ? `M${x(at).toFixed(1)} ${value.toFixed(1)}${shape}` : "";
  }).join("");
}

const box = (left, top, width, height) => `M${left.toFixed(1)} ${top.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`;

function drawLines(panel, curves, area, x, y) {
  for (const {colour: name, trend, style, ...curve} of curves) {
    if (trend) area.append(make("path", {d: path(trend[0], trend[1], x, y), class: "trend", stroke: colour(name), "stroke-width": 4.5,
      opacity: 0.3, fill: "none", "stroke-linejoin": "round"}));
    const few = curve.x.length < FEW;
    if (style !== "points") area.append(make("path", {d: path(curve.x, curve.y, x, y), stroke: colour(name), fill: "none", "stroke-linejoin": "round",
      "stroke-width": style === "dotted" ? 1.6 : 1.2, "stroke-dasharray": style === "dotted" ? LINES.dotted : null}));
    if (style === "diamonds") area.append(make("path", {d: points(curve, x, y, few ? "m0-4l4 4-4 4-4-4z" : "m0-3l3 3-3 3-3-3z"), fill: colour(name)}));
    else if (style === "points" || few) area.append(make("path", {d: points(curve, x, y, "h.01"), stroke: colour(name), "stroke-linecap": "round",
      "stroke-width": few ? 5 : 3.2}));
  }
}

function drawStack(panel, curves, area, x, y) {
  if (!curves.length) return;
  const xs = curves[0].x, few = xs.length < 12, base = xs.map(() => 0);
  for (const curve of curves) {
    const top = base.map((from, i) => from + (curve.y[i] || 0));
    const d = few ? xs.map((at, i) => box(x(at - 0.3), y(top[i]), x(at + 0.3) - x(at - 0.3), y(base[i]) - y(top[i]))).join("")
      : path(xs, top, x, y) + path([...xs].reverse(), [...base].reverse(), x, y).replace("M", "L") + "z";
    area.append(make("path", {d, fill: colour(curve.colour)}));
    top.forEach((value, i) => { base[i] = value; });
  }
}

function drawColumns(panel, curves, area, x, y) {
  const width = 0.8 / Math.max(1, curves.length);
  curves.forEach((curve, index) => {
    const offset = (index - (curves.length - 1) / 2) * width;
    const d = curve.x.map((at, i) => box(x(at + offset - 0.47 * width), y(curve.y[i] || 0), x(at + 0.94 * width) - x(at), y(0) - y(curve.y[i] || 0))).join("");
    area.append(make("path", {d, fill: colour(curve.colour)}));
  });
}

function drawCells(panel, area, x, y) {
  const depths = new Map();
  for (const [row, depth, start, end] of panel.cells)
    depths.set(depth, (depths.get(depth) || "") + box(x(start), y(row + 0.5), x(end) - x(start), y(row - 0.5) - y(row + 0.5)));
  for (const [depth, d] of depths) area.append(make("path", {d, class: "cells", fill: colour("blue"), opacity: 0.08 * depth, "shape-rendering": "crispEdges"}));
}

function drawBars(panel, area, x, y) {
  const colours = new Map();
  for (const [row, start, length, name] of panel.bars)
    colours.set(name, (colours.get(name) || "") + box(x(start), y(row - 0.38), x(start + length) - x(start), y(row + 0.38) - y(row - 0.38)));
  for (const [name, d] of colours) area.append(make("path", {d, class: "bars", fill: colour(name)}));
}

function drawMarks(panel, area, x, place) {
  const colours = new Map();
  let lines = "";
  for (const [step, name, , grave] of panel.marks) {
    const at = x(step);
    if (at < place.left || at > place.right) continue;
    colours.set(name, `${colours.get(name) || ""}M${(at - 4).toFixed(1)} ${place.top - 7}h8l-4 7z`);
    if (grave) lines += `M${at.toFixed(1)} ${place.top}V${place.bottom}`;
  }
  if (lines) area.append(make("path", {d: lines, stroke: colour("red"), opacity: 0.45}));
  for (const [name, d] of colours) area.append(make("path", {d, class: "marks", fill: colour(name)}));
}

// The steps from which the samples of replays are off-policy.
function drawOffPolicy(panel, area, x, place) {
  panel.offPolicy.forEach(([step, name, replay], index) => {
    const at = x(step);
    if (at < place.left || at > place.right) return;
    area.append(make("line", {class: "off-policy", x1: at, x2: at, y1: place.top, y2: place.bottom, stroke: colour(name), "stroke-dasharray": LINES.dashed}));
    const late = at > (place.left + place.right) / 2;
    area.append(make("text", {x: at + (late ? -4 : 4), y: place.top + 10 + 12 * index, "text-anchor": late ? "end" : "start"}, `${replay} off-policy ${late ? "" : "→"}`));
  });
}

// Description of a panel for screen readers.
function describe(panel) {
  const curves = panel.curves.map(({name, y}) => {
    const known = y.filter(isNumber);
    if (!known.length) return "";
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const values = `from ${exact(known[0], panel.form)} to ${exact(known[known.length - 1], panel.form)}, between ${exact(low, panel.form)} and ${exact(high, panel.form)}`;
    return (name ? name + ": " : "") + values;
  });
  const rows = panel.kind === "bars" ? [`${panel.names.join(", ")}; ${panel.legend.map(([name]) => name).join(", ")}`] : [];
  const replays = panel.offPolicy.map(([step, , replay]) => `samples of ${replay} off-policy from step ${step} on`);
  const marks = panel.marks.length ? [`${panel.marks.length} anomalies and notes`] : [];
  return [panel.title, panel.unit, ...curves, ...rows, ...replays, ...marks, panel.curves.length ? "" : panel.empty].filter(Boolean).join(". ");
}

function drawing(panel, width, hidden) {
  const curves = panel.curves.filter(curve => !hidden.has(curve.name));
  const bars = panel.kind === "bars";
  const height = bars ? 58 + TRACK * panel.names.length : panel.wide ? (width < 500 ? 240 : 330) : 225;
  const place = {left: MARGIN.left + (bars ? 14 : 0), right: width - MARGIN.right, top: MARGIN.top + (bars ? 8 : 0), bottom: height - MARGIN.bottom};
  const [from, to] = xRange(panel), [low, high] = bars ? [panel.names.length - 0.5, -0.5] : yRange(panel, curves);
  const x = value => place.left + (value - from) / (to - from) * (place.right - place.left);
  const lift = panel.log && !bars ? value => value > 0 ? Math.log10(value) : NaN : value => value;
  const y = value => place.bottom - (lift(value) - low) / (high - low) * (place.bottom - place.top);
  const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": describe(panel)});

  const xs = panel.kind === "columns" ? panel.names.map((_, i) => i).filter(i => i % Math.ceil(panel.names.length / Math.max(2, width / 75)) === 0)
    : ticks(from, to, Math.max(2, Math.min(8, width / 75)), panel.x === "optimizer step");
  const percent = panel.form === "share", ys = bars ? [] : panel.log ? logTicks(low, high) : ticks(low, high, 4, panel.form === "whole");
  const named = labels(ys, percent);
  for (const [i, value] of ys.entries()) {
    const at = y(value);
    svg.append(make("line", {x1: place.left, x2: place.right, y1: at, y2: at, stroke: colour("line")}));
    svg.append(make("text", {x: place.left - 6, y: at + 4, "text-anchor": "end"}, named[i]));
  }
  const places = labels(xs, false);
  for (const [i, value] of xs.entries()) {
    if (panel.kind === "lines" || panel.kind === "stack") svg.append(make("line", {x1: x(value), x2: x(value), y1: place.top, y2: place.bottom, stroke: colour("line")}));
    svg.append(make("text", {x: x(value), y: place.bottom + 15, "text-anchor": "middle"}, panel.kind === "columns" ? panel.names[value] : places[i]));
  }
  svg.append(make("text", {x: (place.left + place.right) / 2, y: height - 4, "text-anchor": "middle"}, panel.x));

  const area = svg.appendChild(make("g"));
  if (bars) {
    panel.names.forEach((name, row) => svg.append(make("text", {x: place.left - 6, y: y(row) + 4, "text-anchor": "end"}, name)));
    drawBars(panel, area, x, y);
    let written = -Infinity;
    for (const [step, at] of panel.ends) {
      svg.append(make("line", {x1: x(at), x2: x(at), y1: place.top, y2: place.bottom, stroke: colour("ink"), "stroke-width": 0.7}));
      if (x(at) - DIGIT * (String(step).length + 1) < written) continue;
      svg.append(make("text", {class: "end", x: x(at) - 2, y: place.top - 3, "text-anchor": "end"}, String(step)));
      written = x(at);
    }
  } else {
    drawCells(panel, area, x, y);
    ({stack: drawStack, columns: drawColumns}[panel.kind] || drawLines)(panel, curves, area, x, y);
    for (const [value, name] of panel.levels)
      svg.append(make("line", {x1: place.left, x2: place.right, y1: y(value), y2: y(value), stroke: colour(name), "stroke-dasharray": LINES.dashed}));
    drawOffPolicy(panel, svg, x, place);
    drawMarks(panel, svg, x, place);
  }
  svg.append(make("path", {d: `M${place.left} ${place.top}V${place.bottom}H${place.right}`, fill: "none", stroke: colour("axis")}));
  if (!panel.curves.length && panel.empty) svg.append(make("text", {x: (place.left + place.right) / 2, y: height / 2, "text-anchor": "middle"}, panel.empty));
  return {svg, place, from, to, x, curves};
}

// The tip at the pointer or at the selected point

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && Math.abs(xs[low - 1] - x) < Math.abs(xs[low] - x) ? low - 1 : low;
}

const entry = (name, text, value = "") => make("div", {}, make("i", {style: `background:${colour(name)}`}), text, make("b", {}, value));

function onCurves(panel, curves, x, reach) {
  let best = null;
  for (const {x: xs} of curves) {
    const at = xs.length ? xs[nearest(xs, x)] : null;
    if (at !== null && (best === null || Math.abs(at - x) < Math.abs(best - x))) best = at;
  }
  if (best === null) return null;
  const rows = [];
  for (const {name, colour: its, x: xs, y: ys} of curves) {
    const i = nearest(xs, best);
    if (xs.length && Math.abs(xs[i] - best) <= reach) rows.push(entry(its, name ? name + " " : "", exact(ys[i], panel.form)));
  }
  for (const [step, its, replay] of panel.offPolicy) if (Math.abs(step - best) <= reach / 2) rows.push(entry(its, `samples of ${replay} off-policy from here on`));
  for (const [step, its, text] of panel.marks) if (Math.abs(step - best) <= reach / 2) rows.push(entry(its, text));
  const title = panel.kind === "columns" ? panel.names[best] : `${panel.x === "optimizer step" ? "step" : panel.x} ${exact(best)}`;
  return {x: best, rows: [make("div", {}, title), ...rows]};
}

function onBars(panel, x, share) {
  const row = Math.floor(share * panel.names.length);
  const bar = panel.bars.find(([its, start, length]) => its === row && start <= x && x < start + length);
  if (!bar) return null;
  const name = panel.legend.find(([, its]) => its === bar[3]);
  return {x, rows: [make("div", {}, panel.names[row]), entry(bar[3], (name ? name[0] : "") + " ", exact(bar[2]) + " s")]};
}

function follow(figure, panel, drawn) {
  const {svg, place, from, to, x: toX, curves} = drawn;
  const tip = figure.appendChild(make("div", {class: "tip", role: "status", hidden: ""}));
  const line = svg.appendChild(make("line", {stroke: colour("muted"), y1: place.top, y2: place.bottom, visibility: "hidden"}));
  let at = null;
  const hide = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  const show = (x, share) => {
    const found = panel.kind === "bars" ? onBars(panel, x, share) : onCurves(panel, curves, x, Math.max(panel.x === "optimizer step" ? 0.5 : 0, (to - from) / 150));
    if (found === null) return hide();
    at = found.x;
    tip.replaceChildren(...found.rows);
    tip.hidden = false;
    line.setAttribute("visibility", "visible");
    line.setAttribute("x1", toX(at)); line.setAttribute("x2", toX(at));
    const left = svg.offsetLeft || figure.clientLeft + 10, right = left + toX(at) + 10;
    tip.style.left = Math.max(2, right + tip.offsetWidth > figure.clientWidth ? right - 20 - tip.offsetWidth : right) + "px";
    tip.style.top = figure.clientHeight - svg.clientHeight + place.top + "px";
  };
  svg.addEventListener("pointermove", event => {
    const home = svg.getBoundingClientRect();
    const x = from + (event.clientX - home.left - place.left) / (place.right - place.left) * (to - from);
    const share = (event.clientY - home.top - place.top) / (place.bottom - place.top);
    if (x < from || x > to || share < 0 || share >= 1) hide(); else show(x, share);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const ahead = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (event.key === "Escape") hide();
    if (!ahead || panel.kind === "bars") return;
    event.preventDefault();
    const all = [...new Set(curves.flatMap(curve => curve.x))].sort((one, other) => one - other);
    if (all.length) show(at === null ? all[all.length - 1] : all[Math.min(all.length - 1, Math.max(0, nearest(all, at) + ahead))]);
  });
}

// Figures

const figures = new Map();  // title and axis of a panel -> its figure, its content and its hidden curves

// panel.py sends only the first of consecutive steps; this function restores all of them.
function spread(curve) {
  const whole = (xs, ys) => isNumber(xs) ? ys.map((_, i) => xs + i) : xs;
  return {...curve, x: whole(curve.x, curve.y), trend: curve.trend && [whole(...curve.trend), curve.trend[1]]};
}

function legend(one) {
  const names = new Set(one.panel.curves.map(curve => curve.name));
  const entries = one.panel.legend.map(([name, its, sign]) => {
    const key = make("i", {class: sign, style: `border-color:${colour(its)}`});
    if (!names.has(name) || names.size < 2) return make("span", {}, key, name);
    const button = make("button", {type: "button", "aria-pressed": String(!one.hidden.has(name)), title: "Show or hide"}, key, name);
    button.addEventListener("click", () => {
      if (!one.hidden.delete(name)) one.hidden.add(name);
      redraw(one);
      [...one.figure.querySelectorAll(".legend button")].find(other => other.textContent === name)?.focus();
    });
    return button;
  });
  return make("div", {class: "legend"}, ...entries);
}

function redraw(one) {
  const {figure, panel} = one;
  one.width = Math.max(260, figure.clientWidth - 20);
  const drawn = drawing(panel, one.width, one.hidden);
  figure.replaceChildren(make("figcaption", {}, make("b", {}, panel.title), make("span", {}, panel.unit)), legend(one), drawn.svg);
  follow(figure, panel, drawn);
}

function showPanels(panels) {
  const shown = panels.map(panel => {
    const key = panel.title + "\n" + panel.x, text = JSON.stringify(panel);
    const one = figures.get(key) || {figure: make("figure"), hidden: new Set()};
    figures.set(key, one);
    one.figure.className = panel.wide ? "wide" : "";
    one.changed = one.text !== text;
    one.text = text;
    one.panel = {...panel, curves: panel.curves.map(spread)};
    return one;
  });
  for (const [home, its] of [[document.getElementById("first"), shown.slice(0, 1)], [document.getElementById("panels"), shown.slice(1)]])
    if (its.length !== home.children.length || its.some((one, i) => one.figure !== home.children[i])) home.replaceChildren(...its.map(one => one.figure));
  for (const one of shown) if (one.changed) redraw(one);
}

let resizing = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => {
    for (const one of figures.values()) if (one.figure.isConnected && one.width !== Math.max(260, one.figure.clientWidth - 20)) redraw(one);
  });
});

showPanels(JSON.parse(document.getElementById("panels-data").textContent));

// The dashboard

const EVERY_MS = 2000;
const live = {view: "", have: "", requests: 0};

function showParts(parts) {
  for (const node of document.querySelectorAll("[data-part]")) {
    const html = parts[node.dataset.part] || "";
    // Replace only what changed, so that the reader's selection and scroll position stay.
    if (node.shown === html) continue;
    node.shown = html;
    const open = [...node.querySelectorAll("details")].map(one => one.open);
    node.innerHTML = html;
    node.querySelectorAll("details").forEach((one, i) => { one.open = Boolean(open[i]); });
  }
  document.title = document.querySelector("h1").textContent;
  for (const link of document.querySelectorAll("nav a"))
    if (link.hash === "#" + live.view) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
}

function chosenView() {
  const hash = location.hash.slice(1);
  return /^(all|\d+)$/.test(hash) ? hash : live.view || document.body.dataset.live;
}

async function refresh() {
  const request = ++live.requests, view = chosenView(), note = document.querySelector(".live");
  try {
    const have = view === live.view ? live.have : "";
    const response = await fetch(`state/${encodeURIComponent(view)}?have=${have}`, {cache: "no-store"});
    if (request !== live.requests) return;  // another view was chosen in the meantime
    if (response.status === 200) {
      const state = await response.json(), other = view !== live.view;
      live.view = view;
      live.have = state.tag;
      showParts(state.parts);
      showPanels(state.panels);
      if (other) browse();
    } else if (response.status !== 204) throw new Error((await response.text()).slice(0, 300));
    note.classList.remove("lost");
    note.textContent = "live";
  } catch (error) {
    if (request !== live.requests) return;
    note.classList.add("lost");
    note.textContent = error instanceof TypeError ? "the dashboard does not respond; check that mar dashboard is still running" : error.message;
  }
  note.hidden = false;
}

// Samples: the form is part of the server's HTML; responses to its queries are appended below it.
function browse() {
  const form = document.querySelector(".samples form");
  if (!form) return;
  const list = form.parentElement.querySelector(".list"), message = form.parentElement.querySelector(".message");
  const more = form.parentElement.querySelector(".more");
  const request = async from => {
    const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
    query.set("start", from);
    const response = await fetch(`samples/${encodeURIComponent(live.view)}?${query}`, {cache: "no-store"});
    const found = response.ok ? await response.json() : {message: (await response.text()).slice(0, 300), html: "", more: false};
    if (!from) list.replaceChildren();
    list.insertAdjacentHTML("beforeend", found.html);
    message.textContent = found.message;
    more.hidden = !found.more;
  };
  const failed = () => { message.textContent = "the dashboard does not respond"; };
  form.addEventListener("submit", event => { event.preventDefault(); request(0).catch(failed); });
  form.addEventListener("change", () => request(0).catch(failed));
  more.addEventListener("click", () => request(list.querySelectorAll(".sample").length).catch(failed));
  request(0).catch(failed);
}

if (document.body.dataset.live) {
  window.addEventListener("hashchange", refresh);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  const again = async () => { if (!document.hidden) await refresh(); setTimeout(again, EVERY_MS); };
  again();
}
