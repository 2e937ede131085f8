"use strict";
// An interactive spectrum: what a network reaches over what it costs, a dot per width.
//
// drawSpectrum(figure, {series, xLabel, yLabel, formatX, formatY, onPick}) draws into a figure and
// draws again when its size changes. A series is {name, color, points, isLine, isHidden}; a point
// is {x, y, told}, told being the sentence shown while the pointer is near, and if its value is
// uncertain {low, high}. The vertical axis spans at least `leastSpan`, so that noise does not fill
// it, and starts at `floor` if that is given. With several series a legend switches each on and
// off. Returns {mark(point)}, which puts a marker at a point, or at
// none. Plain functions, no modules: the report page carries this file inside itself.

const SPECTRUM_EDGES = {left: 62, right: 14, top: 12, bottom: 40};

function svgElement(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Round numbers that cover a range, about `count` of them.
function niceTicks(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}

// Numbers as people say them: 568.7 M.
function shortCount(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

function drawSpectrum(figure, options) {
  const {series, xLabel, yLabel, onPick} = options;
  const formatX = options.formatX || shortCount;
  const formatY = options.formatY || ((value) => String(value));
  const hidden = new Set(series.filter((one) => one.isHidden));
  const told = document.createElement("p");
  told.className = "told";
  let height = 0;
  let marked = null;
  let place = null; // point → [x, y] in the drawing
  let pointerLayer = null;
  let markerLayer = null;

  const shown = () => series.filter((one) => !hidden.has(one));
  const pointsShown = () => shown().flatMap((one) => one.points);

  function legend() {
    const box = document.createElement("div");
    box.className = "legend";
    for (const one of series) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = one.name;
      button.style.setProperty("--series", one.color);
      button.setAttribute("aria-pressed", String(!hidden.has(one)));
      button.addEventListener("click", () => {
        if (hidden.has(one)) hidden.delete(one);
        else if (shown().length > 1) hidden.add(one); // one stays: an empty plot says nothing
        button.setAttribute("aria-pressed", String(!hidden.has(one)));
        draw();
      });
      box.append(button);
    }
    return box;
  }

  function draw() {
    const across = Math.max(260, figure.clientWidth);
    height = Math.min(380, Math.max(260, Math.round(0.42 * across)));
    const {left, right, top, bottom} = SPECTRUM_EDGES;
    const points = pointsShown();
    const xs = points.map((point) => point.x);
    const ys = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]);
    const highX = Math.max(...xs) * 1.03;
    const rangeY = Math.max(...ys) - Math.min(...ys) || Math.abs(ys[0]) * 0.1 || 1;
    const lacking = Math.max(0, (options.leastSpan || 0) - 1.16 * rangeY) / 2;
    const lowY = options.floor ?? Math.min(...ys) - 0.08 * rangeY - lacking;
    const highY = Math.max(...ys) + 0.08 * rangeY + lacking;
    const toX = (x) => left + (x / highX) * (across - left - right);
    const toY = (y) => height - bottom - ((y - lowY) / (highY - lowY)) * (height - top - bottom);
    place = (point) => [toX(point.x), toY(point.y)];

    const svg = svgElement("svg", {class: "drawn", viewBox: `0 0 ${across} ${height}`, role: "img"});
    svg.setAttribute("aria-label", `${yLabel} over ${xLabel}, ${points.length} widths`);
    for (const tick of niceTicks(lowY, highY, 5)) {
      const y = toY(tick);
      svg.append(svgElement("line", {class: "grid", x1: left, x2: across - right, y1: y, y2: y}));
      svg.append(svgElement("text", {x: left - 8, y: y + 4, "text-anchor": "end"}, formatY(tick)));
    }
    const floor = height - bottom;
    svg.append(svgElement("line", {class: "axis", x1: left, x2: across - right, y1: floor, y2: floor}));
    for (const tick of niceTicks(0, highX, across < 420 ? 3 : 6)) {
      const anchor = tick === 0 ? "start" : "middle";
      svg.append(svgElement("text", {x: toX(tick), y: floor + 17, "text-anchor": anchor}, formatX(tick)));
    }
    svg.append(svgElement("text", {x: (left + across - right) / 2, y: height - 4, "text-anchor": "middle"}, xLabel));
    svg.append(svgElement("text", {x: -(top + floor) / 2, y: 11, transform: "rotate(-90)", "text-anchor": "middle"}, yLabel));

    for (const one of shown()) {
      const group = svgElement("g");
      group.style.setProperty("--series", one.color);
      const path = one.points.map((point) => place(point).join(",")).join(" ");
      if (one.isLine) group.append(svgElement("polyline", {class: "curve", points: path}));
      for (const point of one.points) {
        const [cx, cy] = place(point);
        if (point.low !== undefined) {
          group.append(svgElement("line", {class: "bar", x1: cx, x2: cx, y1: toY(point.low), y2: toY(point.high)}));
        }
        group.append(svgElement("circle", {class: "dot", cx, cy, r: one.isLine ? 3.5 : 5}));
      }
      svg.append(group);
    }
    markerLayer = svgElement("g", {class: "marker"});
    pointerLayer = svgElement("g", {class: "pointer"});
    svg.append(pointerLayer, markerLayer);
    svg.addEventListener("pointermove", (event) => point(event, svg));
    svg.addEventListener("pointerleave", () => { pointerLayer.replaceChildren(); tell(marked); });
    svg.addEventListener("click", (event) => { if (onPick) onPick(nearest(event, svg)); });
    figure.replaceChildren(...(series.length > 1 ? [box] : []), svg, told);
    mark(marked);
  }

  function nearest(event, svg) {
    const size = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / size.width;
    const x = (event.clientX - size.left) * scale;
    const y = (event.clientY - size.top) * scale;
    // Sideways counts most: one points at a width, not at a value.
    const distance = (one) => Math.hypot(place(one)[0] - x, 0.3 * (place(one)[1] - y));
    return pointsShown().reduce((best, one) => (distance(one) < distance(best) ? one : best));
  }

  function point(event, svg) {
    const found = nearest(event, svg);
    const [x, y] = place(found);
    const floor = height - SPECTRUM_EDGES.bottom;
    pointerLayer.replaceChildren(
      svgElement("line", {x1: x, x2: x, y1: SPECTRUM_EDGES.top, y2: floor}),
      svgElement("circle", {cx: x, cy: y, r: 7}),
    );
    tell(found);
  }

  function tell(found) {
    told.textContent = found ? found.told : "";
  }

  function mark(found) {
    marked = found;
    markerLayer.replaceChildren();
    tell(found);
    if (!found || !pointsShown().includes(found)) return;
    const [x, y] = place(found);
    markerLayer.append(
      svgElement("line", {x1: x, x2: x, y1: SPECTRUM_EDGES.top, y2: height - SPECTRUM_EDGES.bottom}),
      svgElement("circle", {cx: x, cy: y, r: 6.5}),
    );
  }

  const box = legend();
  draw();
  let before = figure.clientWidth;
  new ResizeObserver(() => {
    if (figure.clientWidth !== before) {
      before = figure.clientWidth;
      draw();
    }
  }).observe(figure);
  return {mark};
}
