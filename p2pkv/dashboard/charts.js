"use strict";
// Lines over time as SVG: so little is drawn here that a library would be most of the page.

const CHART = { height: 170, left: 62, right: 8, top: 8, bottom: 20 };

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The next of 1, 2 and 5 times a power of ten, or for bytes the next power of two.
function roundUp(value, isBytes) {
  if (!(value > 0)) return isBytes ? 2 : 1; // half a byte would be said as one
  if (isBytes) return 2 ** Math.ceil(Math.log2(value));
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

// `lines`: {name: [values]}, each as long as `times`; null where nothing is known. `format` says a value.
function drawChart(holder, times, lines, { format, seconds, isBytes = false }) {
  const { height, left, right, top, bottom } = CHART;
  const width = Math.max(280, holder.clientWidth); // a unit is a pixel: text is as large on a phone
  const names = Object.keys(lines);
  const known = names.flatMap((name) => lines[name]).filter((value) => value !== null);
  const most = roundUp(Math.max(0, ...known), isBytes);
  const last = times.length ? times[times.length - 1] : 0;
  const x = (time) => width - right - ((last - time) / seconds) * (width - left - right);
  const y = (value) => height - bottom - (value / most) * (height - top - bottom);
  const now = names.map((name) => `${name} ${format(lines[name].findLast((value) => value !== null) ?? 0)}`);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `now: ${now.join(", ")}` });
  for (const part of [0, 0.5, 1]) {
    const at = y(most * part);
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
    svg.append(element("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, format(most * part)));
  }
  for (const [ago, anchor] of [[seconds, "start"], [seconds / 2, "middle"], [0, "end"]]) {
    const label = ago ? `${Math.round(ago / 6) / 10} min ago` : "now";
    svg.append(element("text", { x: x(last - ago), y: height - 5, "text-anchor": anchor }, label));
  }
  names.forEach((name, number) => {
    let path = "";
    let isDown = false;
    times.forEach((time, i) => {
      const value = lines[name][i];
      if (value === null || last - time > seconds) { isDown = false; return; }
      path += `${isDown ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      isDown = true;
    });
    svg.append(element("path", { d: path || "M0 0", fill: "none", stroke: `var(--c${number % 6})`, "stroke-width": 2 }));
  });
  const key = document.createElement("div");
  key.className = "key";
  names.forEach((name, number) => {
    const item = document.createElement("span");
    const mark = document.createElement("i");
    mark.className = "mark";
    mark.style.background = `var(--c${number % 6})`;
    item.append(mark, now[number]);
    key.append(item);
  });
  holder.replaceChildren(svg, key);
}
