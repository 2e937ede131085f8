"use strict";
// "Hold a deadline": load that one can turn up, and what the governor makes of it.

const HEARTBEAT_MS = 400;
const HISTORY_HEIGHT = 156;
const governor = {isOn: false, timer: null};

// The knob is logarithmic, around a deadline that leaves the widest width some room.
function deadlineOf(knob) {
  const widest = widths.rows[widths.rows.length - 1].latency_ms;
  return Math.max(20, 5 * widest) * 10 ** ((knob - 50) / 50);
}

// Up to three times what the widest width could answer.
function loadOf(knob) {
  const widest = widths.rows[widths.rows.length - 1].latency_ms;
  const most = Math.min(3000 / widest, server.about.most_per_second);
  return Math.round((knob / 100) * most);
}

function setUpGovernor(onSwitch) {
  const hold = document.getElementById("hold");
  hold.addEventListener("change", () => {
    governor.isOn = hold.checked;
    document.getElementById("governed").hidden = !hold.checked;
    document.getElementById("width").disabled = hold.checked;
    clearTimeout(governor.timer);
    onSwitch(hold.checked);
    if (hold.checked) beat();
    else sendLoad(0).catch(() => {});
  });
  for (const name of ["deadline", "load"]) {
    document.getElementById(name).addEventListener("input", showKnobs);
  }
  showKnobs();
}

function presentDeadline() {
  return deadlineOf(Number(document.getElementById("deadline").value));
}

function showKnobs() {
  const deadline = presentDeadline();
  const load = loadOf(Number(document.getElementById("load").value));
  const widest = widths.rows[widths.rows.length - 1].latency_ms;
  document.getElementById("deadline-shown").textContent = `${milliseconds(deadline)} ms`;
  const share = Math.round((100 * load * widest) / 1000);
  document.getElementById("load-shown").textContent = load
    ? `${load} per second (${share} % of the widest width's limit)`
    : "none";
}

async function sendLoad(perSecond) {
  const body = JSON.stringify({per_second: perSecond, deadline_ms: presentDeadline()});
  return (await ask("page/load", {method: "POST", body})).json();
}

async function beat() {
  try {
    const state = await sendLoad(loadOf(Number(document.getElementById("load").value)));
    if (governor.isOn) showState(state);
  } catch (error) {
    showMessage(error.message);
  }
  if (governor.isOn) governor.timer = setTimeout(beat, HEARTBEAT_MS);
}

function showState(state) {
  const bins = state.history;
  const recent = bins.slice(-Math.round((5 / state.seconds) * bins.length)); // five seconds
  const requests = recent.reduce((sum, bin) => sum + bin.requests, 0);
  const inTime = recent.reduce((sum, bin) => sum + bin.in_time, 0);
  const known = recent.filter((bin) => bin.mean !== undefined);
  const weight = known.reduce((sum, bin) => sum + bin.requests, 0);
  const mean = known.reduce((sum, bin) => sum + bin.mean * bin.requests, 0) / weight;
  const set = (id, text) => { document.getElementById(id).textContent = text; };
  set("read-in-time", requests ? `${((100 * inTime) / requests).toFixed(1)} %` : "–");
  set("read-mean-width", weight ? mean.toFixed(2) : "–");
  set("read-rate", (inTime / 5).toFixed(0));
  set("read-waiting", String(state.waiting));
  drawHistory(state);
}

function drawHistory(state) {
  const figure = document.getElementById("history");
  const across = Math.max(280, figure.clientWidth);
  const [left, right, top, bottom] = [40, 8, 8, 24];
  const numbers = widths.rows.map((row) => row.width).filter((width) => typeof width === "number");
  const low = Math.min(...numbers);
  const high = Math.max(...numbers);
  const step = (across - left - right) / state.history.length;
  const toX = (bin) => left + (bin + 0.5) * step;
  const toY = (width) => HISTORY_HEIGHT - bottom - 14 - ((width - low) / (high - low || 1)) * (HISTORY_HEIGHT - top - bottom - 18);
  const svg = svgElement("svg", {class: "drawn", viewBox: `0 0 ${across} ${HISTORY_HEIGHT}`, role: "img", "aria-label": "widths served in the last half minute"});
  for (const tick of niceTicks(low, high, 4)) {
    svg.append(svgElement("line", {class: "grid", x1: left, x2: across - right, y1: toY(tick), y2: toY(tick)}));
    svg.append(svgElement("text", {x: left - 8, y: toY(tick) + 4, "text-anchor": "end"}, String(tick)));
  }
  const floor = HISTORY_HEIGHT - bottom;
  let line = "";
  state.history.forEach((bin, k) => {
    if (bin.mean === undefined) { if (!bin.requests) return; } else {
      const y = toY(bin.widest);
      const height = Math.max(2, toY(bin.narrowest) - y);
      svg.append(svgElement("rect", {class: "spread", x: toX(k) - step / 2, y, width: step + 0.3, height}));
      line += `${line ? " " : ""}${toX(k)},${toY(bin.mean)}`;
    }
    const missed = (bin.requests - bin.in_time) / bin.requests;
    svg.append(svgElement("rect", {class: "in-time", x: toX(k) - step / 2 + 0.4, y: floor - 6, width: step - 0.8, height: 6}));
    if (missed) svg.append(svgElement("rect", {class: "missed", x: toX(k) - step / 2 + 0.4, y: floor - 6, width: step - 0.8, height: Math.max(2, 6 * missed)}));
  });
  svg.append(svgElement("polyline", {class: "mean", points: line}));
  svg.append(svgElement("text", {x: left, y: floor + 17}, `${state.seconds} s ago`));
  svg.append(svgElement("text", {x: across - right, y: floor + 17, "text-anchor": "end"}, "now"));
  const caption = document.createElement("figcaption");
  caption.textContent = "Width served, mean and range; below it green for in time, red for missed.";
  figure.replaceChildren(svg, caption);
}
