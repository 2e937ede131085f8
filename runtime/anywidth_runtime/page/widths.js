"use strict";
// The dial, the numbers beside it, and the spectrum.

const BAR_COUNT = 40;
const ACCURACY_NAMES = {top1_accuracy: "top-1, %", psnr: "PSNR, dB", score: "score"};
const widths = {rows: [], places: [], current: 0, spectrum: null, size: 1, onChange: () => {}};

// Where a width is on the dial: its share of the channels; named ones by their multiply-adds.
function placeOf(row) {
  const most = widths.rows[widths.rows.length - 1].multiply_adds;
  return typeof row.width === "number" ? row.width : Math.sqrt(row.multiply_adds / most);
}

function widthText(width) {
  if (typeof width !== "number") return width;
  const text = String(Number(width.toFixed(4)));
  return text.includes(".") ? text : `${text}.0`;
}

function milliseconds(value) {
  return value < 10 ? value.toFixed(2) : value.toFixed(1);
}

function accuracyText(value) {
  return value === null || value === undefined ? "–" : String(Number(value.toFixed(2)));
}

function accuracyName(about) {
  const name = about.accuracy_name || "accuracy";
  return ACCURACY_NAMES[name] || name.replaceAll("_", " ");
}

function setUpWidths(about, onChange) {
  widths.rows = about.table;
  widths.places = widths.rows.map(placeOf);
  widths.onChange = onChange;
  const channels = document.getElementById("channels");
  for (let k = 0; k < BAR_COUNT; k++) channels.append(document.createElement("i"));
  const first = widths.rows[0];
  const last = widths.rows[widths.rows.length - 1];
  document.getElementById("narrowest").textContent = `${widthText(first.width)} narrowest`;
  document.getElementById("widest").textContent = `${widthText(last.width)} widest`;
  document.getElementById("accuracy-name").textContent = accuracyName(about);
  const dial = document.getElementById("width");
  dial.addEventListener("input", () => pick(nearestPlace(dial.value / 1000)));
  dial.addEventListener("keydown", (event) => {
    const steps = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 4, PageDown: -4, Home: -1e9, End: 1e9};
    if (event.key in steps) {
      event.preventDefault();
      pick(Math.min(widths.rows.length - 1, Math.max(0, widths.current + steps[event.key])));
    }
  });
  drawWidths(about);
  showWidth(widths.rows.length - 1);
}

function nearestPlace(share) {
  const distance = (index) => Math.abs(widths.places[index] - share);
  return widths.places.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0);
}

function drawWidths(about) {
  const hasAccuracy = widths.rows.every((row) => row.accuracy !== null);
  const points = widths.rows.map((row, index) => ({
    x: row.multiply_adds,
    y: hasAccuracy ? row.accuracy : row.latency_ms,
    index,
    told: `width ${widthText(row.width)}: ${shortCount(row.multiply_adds)} multiply-adds, ${milliseconds(row.latency_ms)} ms` +
      (hasAccuracy ? `, ${accuracyName(about)} ${accuracyText(row.accuracy)}` : ""),
  }));
  widths.points = points;
  widths.spectrum = drawSpectrum(document.getElementById("spectrum"), {
    series: [{name: about.name, color: "var(--accent)", points, isLine: true}],
    xLabel: "multiply-adds",
    yLabel: hasAccuracy ? accuracyName(about) : "latency, ms",
    onPick: (point) => { if (!document.getElementById("width").disabled) pick(point.index); },
  });
}

function pick(index) {
  showWidth(index);
  widths.onChange();
}

// Moves everything to a row of the table.
function showWidth(index) {
  widths.current = index;
  const row = widths.rows[index];
  const dial = document.getElementById("width");
  dial.value = Math.round(1000 * widths.places[index]);
  dial.setAttribute("aria-valuetext", `width ${widthText(row.width)}, ${shortCount(row.multiply_adds)} multiply-adds`);
  [...document.getElementById("channels").children].forEach((bar, k) => {
    bar.classList.toggle("on", (k + 0.5) / BAR_COUNT <= widths.places[index]);
  });
  document.getElementById("read-width").textContent = widthText(row.width);
  showMultiplyAdds(row.multiply_adds * widths.size);
  document.getElementById("read-accuracy").textContent = accuracyText(row.accuracy);
  showLatency(row.latency_ms * widths.size);
  widths.spectrum.mark(widths.points[index]);
}

// Of the input that was run: larger pictures take more than the table's example.
function showMultiplyAdds(value) {
  widths.size = value / widths.rows[widths.current].multiply_adds;
  document.getElementById("read-macs").textContent = shortCount(value);
}

function showLatency(value) {
  const unit = Object.assign(document.createElement("small"), {textContent: " ms"});
  document.getElementById("read-latency").replaceChildren(milliseconds(value), unit);
}

function indexOfWidth(width) {
  return widths.rows.findIndex((row) => row.width === width);
}
