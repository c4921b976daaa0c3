// Draws a page's curves with uPlot: of the page's own data, or of its server's, again when the log has grown.
"use strict";
(() => {
  const HEIGHT_PX = 220;
  const drawn = new Map();
  const place = document.getElementById("curves"), following = document.getElementById("following");
  const own = document.getElementById("curves-data");
  let bounds = null; // the steps that the reader chose; null is all of them

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const inkOf = (line) => (line.colour === "black" ? colour("--text") : line.colour);
  const shown = (value, curve) =>
    value == null ? "–" : curve.is_share ? `${(100 * value).toFixed(2)} %` : Number(value.toPrecision(4)).toString();
  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });

  function zoom(first, last) {
    bounds = first === null ? null : { min: first, max: last };
    for (const { plot } of drawn.values()) plot.setScale("x", bounds ?? wholeOf(plot.data[0]));
  }

  function wholeOf(steps) {
    return { min: steps[0], max: Math.max(steps[steps.length - 1], steps[0] + 1) };
  }

  function options(curve, width) {
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const labels = (_plot, values) => values.map((value) =>
      curve.is_share ? `${Number((100 * value).toPrecision(4))} %` : Number(value.toPrecision(4)).toString());
    return {
      width,
      height: HEIGHT_PX,
      scales: { x: { time: false } },
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      axes: [axis, { ...axis, size: 75, values: labels }],
      series: [
        { label: "step" },
        ...curve.lines.map((line) => ({
          label: line.label,
          stroke: inkOf(line),
          points: { fill: inkOf(line) },
          width: 1.5,
          dash: line.is_dashed ? [5, 4] : undefined,
          spanGaps: true,
          value: (_plot, value) => shown(value, curve),
        })),
      ],
    };
  }

  const dataOf = (curve) => [curve.steps, ...curve.lines.map((line) => line.values)];

  function add(curve) {
    const figure = document.createElement("figure");
    figure.append(element("h3", curve.question));
    const target = document.createElement("div");
    figure.append(target);
    const names = [...new Set(curve.lines.map((line) => line.figure))].join(", ");
    figure.append(element("figcaption", `${curve.label}. ${curve.reading} Figures of the log: ${names}.`));
    place.append(figure);
    const plot = new uPlot(options(curve, target.clientWidth), dataOf(curve), target);
    drawn.set(curve.name, { plot, target, lines: curve.lines.length });
  }

  function show(curve) {
    const known = drawn.get(curve.name);
    if (known === undefined) {
      add(curve);
    } else if (known.lines !== curve.lines.length) {
      known.plot.destroy();
      known.plot = new uPlot(options(curve, known.target.clientWidth), dataOf(curve), known.target);
      known.lines = curve.lines.length;
    } else {
      known.plot.setData(dataOf(curve), false);
    }
  }

  async function load() {
    if (own) return JSON.parse(own.textContent);
    const answer = await fetch(place.dataset.source);
    if (!answer.ok) throw new Error(`the curves were refused with status ${answer.status}`);
    return answer.json();
  }

  async function draw() {
    (await load()).forEach(show);
    if (bounds) zoom(bounds.min, bounds.max);
    else zoom(null, null);
  }

  async function refresh() {
    const answer = await fetch("/");
    if (answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const id of ["facts", "details"]) document.getElementById(id).replaceWith(page.getElementById(id));
    }
    await draw();
  }

  const say = (error) => { following.textContent = `Cannot be shown now: ${error.message}. Load the page again.`; };
  document.getElementById("range").addEventListener("submit", (event) => {
    event.preventDefault();
    const [first, last] = ["first", "last"].map((name) => Number(event.target.elements[name].value));
    if (last > first) zoom(first, last);
    else following.textContent = "Give two steps, the second after the first.";
  });
  document.getElementById("range").addEventListener("reset", () => zoom(null, null));
  addEventListener("resize", () => {
    for (const { plot, target } of drawn.values()) plot.setSize({ width: target.clientWidth, height: HEIGHT_PX });
  });

  draw().catch(say);
  if (!("open" in place.dataset)) return; // the run has ended
  // follow.js hears of changes.
  const note = (text) => () => { following.textContent = text; };
  note("Follows the run.")();
  addEventListener("log-followed", note("Follows the run."));
  addEventListener("log-lost", note("Lost the page's server; tries again."));
  addEventListener("log-changed", () => refresh().catch(say));
})();
