// Draws a page's curves with uPlot: of the page's own data, or of its server's, again when the log has grown.
"use strict";
(() => {
  const HEIGHT_PX = 220, DASHES = { dashed: [5, 4], dotted: [2, 3] };
  const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)); // between marks of steps
  const drawn = new Map(), captions = new Map();
  const place = document.getElementById("curves"), following = document.getElementById("following");
  const own = document.getElementById("curves-data");
  let bounds = null; // the steps that the reader chose; null is all of them

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const inkOf = (line) => (line.colour === "black" ? colour("--text") : line.colour);
  const rounded = (value, isShare) => (isShare ? `${Number((100 * value).toPrecision(4))} %` : `${Number(value.toPrecision(4))}`);
  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });

  function zoom(first, last) {
    bounds = first === null ? null : { min: first, max: last };
    for (const { plot } of drawn.values()) plot.setScale("x", bounds ?? wholeOf(plot.data[0]));
  }

  function wholeOf(steps) {
    return { min: steps[0], max: Math.max(steps[steps.length - 1], steps[0] + 1) };
  }

  // Lines with the values where they are drawn. Stacked ones are drawn on the sum of those before them, the highest sum
  // first, so that each covers the part of the others; a line with widths has both edges of its band after it.
  function layersOf(curve) {
    const sums = curve.steps.map(() => 0), stacked = [], others = [];
    for (const line of curve.lines) {
      const drawnAt = line.style !== "stacked" ? line.values
        : line.values.map((value, i) => (value === null ? null : (sums[i] += value)));
      (line.style === "stacked" ? stacked : others).push({ line, values: drawnAt });
      for (const sign of line.widths ? [1, -1] : []) {
        const values = line.values.map((value, i) => (value === null ? null : value + sign * (line.widths[i] ?? 0)));
        others.push({ line, values, isEdge: true });
      }
    }
    return [...stacked.reverse(), ...others];
  }

  // What the legend says of a line at a step; a stacked line is drawn elsewhere.
  function shown(line, place, isShare) {
    const [value, width] = [line.values[place], line.widths?.[place]].map((of) => (of == null ? "" : rounded(of, isShare)));
    return value ? value + (width && ` ± ${width}`) : "–";
  }

  function seriesOf({ line, isEdge }, known) {
    const ink = inkOf(line);
    if (isEdge) return { class: "edge", stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    const value = (_plot, _value, series, place) => shown(known.layers[series - 1].line, place, known.isShare);
    const series = { label: line.label, stroke: ink, value, width: 1.5, dash: DASHES[line.style], spanGaps: true, points: { fill: ink } };
    switch (line.style) {
      case "stacked":
        return { ...series, fill: ink, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [1, Infinity] }) };
      case "points": return { ...series, points: { show: true, fill: ink } };
      case "faint": return { ...series, width: 1, alpha: 0.35, points: { show: false } };
      default: return line.figure ? series : { ...series, points: { show: false } };
    }
  }

  function options(curve, known) {
    const { layers } = known;
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const labels = (_plot, values) => values.map((value) => rounded(value, curve.is_share));
    const range = (_plot, min, max) => {
      if (min === null) return [null, null];
      const pad = Math.abs(max) / 4 || (curve.least_top ?? 1); // of a flat line
      const [low, high] = min === max ? [min - pad, max + pad] : uPlot.rangeNum(min, max, 0.1, true);
      return [curve.low ?? low, Math.max(curve.high ?? high, curve.least_top ?? -Infinity)];
    };
    const bands = layers.flatMap(({ line, isEdge }, i) =>
      isEdge && layers[i - 1].line === line && !layers[i - 1].isEdge ? [{ series: [i + 1, i + 2], fill: `${line.colour}33` }] : []);
    return {
      width: known.target.clientWidth,
      height: HEIGHT_PX,
      scales: { x: { time: false }, y: { range } },
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 75, label: curve.label, labelSize: 20, values: labels }],
      bands,
      series: [{ label: "step" }, ...layers.map((layer) => seriesOf(layer, known))],
    };
  }

  // The caption of a question's figure, which may have several curves.
  function captionOf(curve) {
    if (!captions.has(curve.question)) {
      const figure = document.createElement("figure"), caption = element("figcaption", `${curve.reading} Figures of the log:`);
      figure.append(element("h3", curve.question), caption);
      place.append(figure);
      captions.set(curve.question, caption);
    }
    return captions.get(curve.question);
  }

  function targetOf(curve) {
    const target = document.createElement("div"), caption = captionOf(curve);
    caption.before(target);
    const names = [...new Set(curve.lines.map((line) => line.figure))].filter(Boolean).join(", ");
    caption.append(` ${curve.label}: ${names}.`);
    return target;
  }

  function draw(curve) {
    const layers = layersOf(curve), data = [curve.steps, ...layers.map(({ values }) => values)];
    const known = drawn.get(curve.name) ?? { target: targetOf(curve), isShare: curve.is_share };
    const isSame = known.layers?.length === layers.length;
    known.layers = layers;
    if (isSame) {
      known.plot.setData(data, false);
    } else {
      known.plot?.destroy();
      known.plot = new uPlot(options(curve, known), data, known.target);
    }
    drawn.set(curve.name, known);
  }

  async function load() {
    if (own) return JSON.parse(own.textContent);
    const answer = await fetch(place.dataset.source);
    if (!answer.ok) throw new Error(`the curves were refused with status ${answer.status}`);
    return answer.json();
  }

  async function drawAll() {
    (await load()).forEach(draw);
    if (bounds) zoom(bounds.min, bounds.max);
    else zoom(null, null);
  }

  async function refresh() {
    const answer = await fetch("/");
    if (answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const id of ["facts", "details"]) document.getElementById(id).replaceWith(page.getElementById(id));
    }
    await drawAll();
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

  drawAll().catch(say);
  if (!("open" in place.dataset)) return; // the run has ended
  // follow.js hears of changes.
  const note = (text) => () => { following.textContent = text; };
  note("Follows the run.")();
  addEventListener("log-followed", note("Follows the run."));
  addEventListener("log-lost", note("Lost the page's server; tries again."));
  addEventListener("log-changed", () => refresh().catch(say));
})();
