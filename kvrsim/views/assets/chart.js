"use strict";
/* Charts of lines and points, drawn by uPlot, with the colours, words and keys of a page.
 *
 * kv.chart(host, about) draws into an element and returns {set(xs, series), all(), to(least, most), plot()}; about:
 *   label    what it shows, for screen readers
 *   height   CSS pixels, 300 by default
 *   x, y     {title, format: value -> text, log: true, least, most, tight}; `log`: a logarithmic axis, by powers of 10,
 *            or of 2 with `log: 2`; tight: from the least value to the most, not to round numbers
 *   xs       ascending numbers that all series share
 *   series   [{name, colour: "--strategy-tsp", values, low, high, points: true, line: false, dash: [4, 4]}]; values beside
 *            xs, null where there is none; off: true: switched off; low, high: both ends of an interval, drawn as a band
 *            unless band is false
 *            step: true: each value holds until the next; spans: true: lines go over gaps; size: of points, CSS pixels;
 *            share: of the colour's strength in points, 0 to 1
 *   marks    [{axis: "x" or "y", value, text, drag: value => ..}]: lines across; one with `drag` is moved by pointer or arrow
 *            keys, and `drag` hears of it
 *   rings    [{x, y}]: points with a circle around them; read at every drawing
 *   switched name => ...: the reader switches a series in the legend; by default the chart hides it
 *   zoomed   (least, most) => ...: the reader has chosen another part of x
 *   hover    index => [title, [[label, text], ...]]; by default x and the values of all series
 *
 * Ctrl and the wheel zoom x about the pointer, a drag selects, a double click shows all. The legend switches series. With the
 * focus on the chart, the arrow keys go from value to value, plus and minus zoom, and 0 shows all.
 */
kv.chart = (host, about) => {
  let { xs, series } = about;
  let plot = null;
  let here = null;
  let telling = false;
  const off = new Set();
  const isOff = (one) => one.off ?? off.has(one.name);
  const marks = about.marks ?? [];
  const x = { format: String, ...about.x };
  const y = { format: String, ...about.y };
  const height = about.height ?? 300;
  const box = kv.el("div", { class: "chart", tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": about.label });
  const legend = kv.el("div", { class: "legend", role: "group", "aria-label": "Series" });
  const whole = kv.el("div", {}, box, legend);
  host.append(whole);
  kv.picture(whole, about.label);

  const hasBand = (one) => Boolean(one.low) && one.band !== false;
  const columns = () => [xs, ...series.flatMap((one) => (hasBand(one) ? [one.values, one.low, one.high] : [one.values]))];
  const faint = (colour, share) => (share === 1 ? colour : `color-mix(in srgb, ${colour} ${100 * share}%, transparent)`);
  const paths = (one) => (one.step ? uPlot.paths.stepped({ align: 1 }) : undefined);

  function options(width) {
    const lines = [{}];
    const bands = [];
    for (const one of series) {
      const colour = kv.colour(one.colour);
      const show = !isOff(one);
      lines.push({
        label: one.name, show, stroke: colour, width: one.line === false ? 0 : 2, dash: one.dash, spanGaps: Boolean(one.spans),
        paths: one.line === false ? () => null : paths(one),
        points: { show: one.points ?? one.line === false, size: one.size ?? 7, width: one.share ? 0 : 1, fill: faint(colour, one.share ?? 1), stroke: colour },
      });
      if (!hasBand(one)) continue;
      const edge = { show, stroke: "transparent", width: 0, points: { show: false }, paths: paths(one) };
      lines.push({ ...edge, label: `${one.name}, low` }, { ...edge, label: `${one.name}, high` });
      bands.push({ series: [lines.length - 1, lines.length - 2], fill: faint(colour, 0.22) });
    }
    const axis = (of) => ({
      label: of.title, labelSize: of.title ? 22 : 0, labelGap: 2, font: "11.5px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      stroke: kv.colour("--dim"), grid: { stroke: kv.colour("--line"), width: 0.7 }, ticks: { stroke: kv.colour("--line"), width: 0.7 },
      values: (_, values) => values.map((value) => (value === null ? "" : of.format(value))),
      ...(of.log && of.tight ? { splits: round(of) } : {}),
    });
    const range = (of) => (of.least === undefined && of.most === undefined && !of.tight ? undefined
      : (_, least, most) => [of.least ?? least, of.most ?? most]);
    // uPlot begins the marks of a logarithmic axis at its least value; those of a tight one are round.
    const round = (of) => of.log && of.tight && ((_, __, low, high) => {
      const [base, steps] = of.log === 2 ? [2, [1]] : [10, [1, 2, 5]];
      const found = [];
      for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high; power += 1) found.push(...steps.map((step) => step * base ** power));
      return found.filter((value) => value >= low && value <= high);
    });
    const scale = (of) => ({ time: false, distr: of.log ? 3 : 1, log: of.log === 2 ? 2 : 10, range: range(of) });
    return {
      width, height, legend: { show: false }, series: lines, bands, padding: [10, 14, 0, 0],
      axes: [{ ...axis(x), size: 34 }, { ...axis(y), size: 64 }], scales: { x: { ...scale(x), auto: true }, y: scale(y) },
      cursor: { drag: { x: true, y: false }, points: { size: 8 } },
      hooks: { setCursor: [hovered], draw: [drawMarks], setScale: [(chart, key) => key === "x" && rangeChanged(chart.scales.x)] },
    };
  }

  function draw(width, whole = false) {
    const zoomed = plot && !whole && [plot.scales.x.min, plot.scales.x.max];
    plot?.destroy();
    plot = new uPlot(options(width), columns(), box);
    if (zoomed && (zoomed[0] > xs[0] || zoomed[1] < xs[xs.length - 1])) plot.setScale("x", { min: zoomed[0], max: zoomed[1] });
    plot.over.addEventListener("mouseleave", hide);
    plot.over.addEventListener("wheel", wheel, { passive: false });
    plot.over.addEventListener("pointerdown", grab);
  }
  function describe(index) {
    if (about.hover) return about.hover(index);
    const shown = series.filter((one) => !isOff(one) && one.values[index] !== null && one.values[index] !== undefined);
    const words = (one) => y.format(one.values[index]) + (one.low ? ` (${y.format(one.low[index])} to ${y.format(one.high[index])})` : "");
    return [`${x.title ?? ""} ${x.format(xs[index])}`.trim(), shown.map((one) => [one.name, words(one)])];
  }
  function hovered(chart) {
    const { idx, left, top } = chart.cursor;
    if (idx === null || idx === undefined || left < 0) return hide();
    const place = chart.over.getBoundingClientRect();
    telling = true;
    return kv.tip.at(place.left + left, place.top + top, ...describe(idx));
  }
  function hide() {  // another's tooltip stays
    if (telling) kv.tip.hide();
    telling = false;
  }
  function drawMarks(chart) {
    const { ctx, bbox } = chart;
    const density = window.devicePixelRatio || 1;
    ctx.save();
    ctx.font = `${11.5 * density}px system-ui, sans-serif`;
    for (const mark of marks) {
      const place = chart.valToPos(mark.value, mark.axis, true);
      const level = mark.axis === "y";
      ctx.strokeStyle = ctx.fillStyle = kv.colour(mark.drag ? "--accent" : "--ink");
      ctx.lineWidth = (mark.drag ? 2 : 1.2) * density;
      ctx.setLineDash(mark.drag ? [] : [5 * density, 3 * density]);
      ctx.beginPath();
      ctx.moveTo(level ? bbox.left : place, level ? place : bbox.top);
      ctx.lineTo(level ? bbox.left + bbox.width : place, level ? place : bbox.top + bbox.height);
      ctx.stroke();
      const words = typeof mark.text === "function" ? mark.text(mark.value) : mark.text ?? "";
      const back = !level && place + 5 * density + ctx.measureText(words).width > bbox.left + bbox.width;
      ctx.textAlign = level || back ? "right" : "left";
      ctx.textBaseline = level ? "bottom" : "top";
      ctx.fillText(words, level ? bbox.left + bbox.width - 4 * density : place + (back ? -5 : 5) * density, level ? place - 3 * density : bbox.top + 2 * density);
    }
    ctx.setLineDash([]);
    for (const ring of about.rings ?? []) {
      ctx.strokeStyle = kv.colour("--accent");
      ctx.lineWidth = 2 * density;
      ctx.beginPath();
      ctx.arc(chart.valToPos(ring.x, "x", true), chart.valToPos(ring.y, "y", true), 8 * density, 0, 2 * Math.PI);
      ctx.stroke();
    }
    ctx.restore();
  }

  // -- zoom, marks, keys

  const isLog = Boolean(x.log);
  const there = (value) => (isLog ? Math.log(value) : value);
  const back = (value) => (isLog ? Math.exp(value) : value);
  function zoom(factor, around) {
    const [least, most] = [there(xs[0]), there(xs[xs.length - 1])];
    const [begin, end] = [there(plot.scales.x.min), there(plot.scales.x.max)];
    const middle = around === undefined ? (begin + end) / 2 : there(around);
    const low = Math.max(least, middle - (middle - begin) / factor);
    const high = Math.min(most, middle + (end - middle) / factor);
    if (high > low) plot.setScale("x", { min: back(low), max: back(high) });
  }
  const all = () => plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
  const address = kv.plain(about.label.split(/[,.:]/)[0]);
  function rangeChanged({ min, max }) {
    kv.view.set(address, min <= xs[0] && max >= xs[xs.length - 1] ? null : [min, max].map((value) => Number(value.toPrecision(7))).join());
    about.zoomed?.(min, max);
  }
  kv.view.keep(address, (range) => to(...range.split(",").map(Number)));
  function wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.002), plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x"));
  }
  function move(mark, value) {
    mark.value = value;
    plot.redraw(false);
    mark.drag(value);
  }
  function grab(event) {
    const box = plot.over.getBoundingClientRect();
    const at = (one, axis) => (axis === "y" ? one.clientY - box.top : one.clientX - box.left);
    const mark = marks.find((one) => one.drag && Math.abs(plot.valToPos(one.value, one.axis) - at(event, one.axis)) < 9);
    if (!mark) return;
    event.stopPropagation();
    plot.over.setPointerCapture(event.pointerId);
    const scale = () => plot.scales[mark.axis];
    const follow = (one) => move(mark, Math.min(scale().max, Math.max(scale().min, plot.posToVal(at(one, mark.axis), mark.axis))));
    const stop = () => {
      plot.over.removeEventListener("pointermove", follow);
      plot.cursor.drag.setScale = plot.cursor.drag.x = true;
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    };
    plot.cursor.drag.setScale = plot.cursor.drag.x = false;
    plot.over.addEventListener("pointermove", follow);
    plot.over.addEventListener("pointerup", stop, { once: true });
  }
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const mark = marks.find((one) => one.drag && one.axis === "y");
    const nudge = (share) => mark && move(mark, mark.value + share * (plot.scales.y.max - plot.scales.y.min));
    const go = (index) => {
      here = Math.max(0, Math.min(xs.length - 1, index));
      const [value] = series.filter((one) => !isOff(one)).map((one) => one.values[here]).filter((one) => one !== null && one !== undefined);
      plot.setCursor({ left: plot.valToPos(xs[here], "x"), top: value === undefined ? 10 : plot.valToPos(value, "y") });
      const [title, rows] = describe(here);
      kv.say([title, ...rows.map((row) => row.join(" "))].join(", "));
    };
    const keys = {
      ArrowLeft: () => go((here ?? xs.length) - 1), ArrowRight: () => go((here ?? -1) + 1), Home: () => go(0), End: () => go(xs.length - 1),
      "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6), 0: all, Escape: hide,
      ...(mark ? { ArrowUp: () => nudge(0.02), ArrowDown: () => nudge(-0.02) } : {}),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  box.addEventListener("blur", hide);

  function name() {
    if (series.length < 2) return legend.replaceChildren();
    const buttons = series.map((one) => kv.el("button", {
      type: "button", "aria-pressed": String(!isOff(one)), class: "series",
      on: { click: () => {
        if (about.switched) return about.switched(one.name);
        if (!off.delete(one.name)) off.add(one.name);
        name();
        draw(box.clientWidth);
      } },
    }, kv.chip(one.colour), one.name));
    return legend.replaceChildren(...buttons);
  }
  function set(newXs, newSeries) {
    const same = (one, other) => one.name === other.name && isOff(one) === isOff(other) && hasBand(one) === hasBand(other);
    const alike = plot && newSeries.length === series.length && newSeries.every((one, index) => same(one, series[index]));
    [xs, series] = [newXs, newSeries];
    here = null;
    if (alike) return plot.setData(columns());
    name();
    return plot && draw(box.clientWidth, true);
  }
  name();
  kv.fit(box, draw);
  kv.onTheme(() => plot && draw(box.clientWidth));
  const to = (min, max) => plot && (plot.scales.x.min !== min || plot.scales.x.max !== max) && plot.setScale("x", { min, max });
  return { set, all, to, plot: () => plot };
};
