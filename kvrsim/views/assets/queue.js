"use strict";
/* The requests of a capacity plan: the queue and the TTFTs over time, zoomed together, and the TTFTs by length. */
kv.ready((data) => {
  const host = document.getElementById("queue");
  if (!host || !data.requests) return;
  const { requests, percentile, slo_s: slo } = data;
  const clock = (value) => `${Number(value.toPrecision(6))} s`;
  const whole = (value) => (Number.isInteger(value) ? String(value) : "");
  const target = () => ({ axis: "y", value: slo, text: `target ${kv.seconds(slo)}` });
  const every = requests.every > 1 ? ` (one of ${requests.every} requests)` : "";
  const part = (title) => {
    const made = kv.el("div", {});
    host.append(kv.el("h3", { text: title }), made);
    return made;
  };

  let telling = false;
  const charts = [];
  function follow(from) {
    return (least, most) => {
      if (telling) return;
      telling = true;
      for (const one of charts) if (one !== charts[from]) one.to(least, most);
      telling = false;
    };
  }
  const { time_s: times, waiting } = requests.queue;
  const ends = [Math.min(times[0], requests.arrival_s[0]), Math.max(times[times.length - 1], requests.arrival_s[requests.arrival_s.length - 1])];
  const buttons = kv.el("div", { class: "tools" }, kv.el("span", { class: "group" },
    ...[["+", "Zoom in", 0.5], ["−", "Zoom out", 2]].map(([text, title, factor]) => kv.el("button", { type: "button", text, title, "aria-label": title, on: { click: () => zoom(factor) } })),
    kv.el("button", { type: "button", text: "All", title: "Show all", on: { click: () => show(...ends) } })),
  kv.el("button", { type: "button", text: "Longest queue", on: { click: longest } }));
  host.append(buttons);
  charts.push(kv.chart(part("Prompts waiting"), {
    label: "Prompts waiting over time", height: 190, xs: [...times, ends[1]], series: [{ name: "waiting", colour: "--accent", step: true, points: false, values: [...waiting, waiting[waiting.length - 1]] }],
    x: { title: "time", format: clock }, y: { title: "prompts", format: whole, least: 0 }, zoomed: follow(0),
    hover: (index) => [clock(times[Math.min(index, times.length - 1)]), [["waiting", String(waiting[Math.min(index, waiting.length - 1)])]]],
  }));
  charts.push(kv.chart(part(`TTFT of each request${every}`), {
    label: "TTFT of each request over time", height: 230, xs: requests.arrival_s, marks: [target()],
    series: [{ name: "TTFT", colour: "--accent", line: false, size: 4, share: 0.55, values: requests.ttft_s }],
    x: { title: "arrival", format: clock }, y: { title: "TTFT", format: kv.seconds, least: 0 }, zoomed: follow(1),
    hover: (index) => [`arrives at ${clock(requests.arrival_s[index])}`, [["TTFT", kv.seconds(requests.ttft_s[index])], ["new tokens", String(requests.new_tokens[index])]]],
  }));
  function show(least, most) {
    for (const one of charts) one.to(least, most);
  }
  function zoom(factor) {
    const { min, max } = charts[0].plot().scales.x;
    const [middle, half] = [(min + max) / 2, ((max - min) / 2) * factor];
    show(Math.max(ends[0], middle - half), Math.min(ends[1], middle + half));
  }
  function longest() {
    const index = waiting.reduce((best, value, place) => (value > waiting[best] ? place : best), 0);
    const half = (ends[1] - ends[0]) / 40;
    show(Math.max(ends[0], times[index] - half), Math.min(ends[1], times[index] + half));
    kv.say(`At most ${waiting[index]} prompts wait, at ${clock(times[index])}`);
  }

  // -- by length

  const order = requests.new_tokens.map((_, index) => index).sort((a, b) => requests.new_tokens[a] - requests.new_tokens[b]);
  const points = [...order.map((index) => ({ x: requests.new_tokens[index], index }))];
  requests.by_length.forEach((line, number) => line.new_tokens.forEach((x, place) => points.push({ x, line: number, y: line.ttft_s[place] })));
  points.sort((a, b) => a.x - b.x);
  const dots = { name: "requests", colour: "--accent", line: false, size: 4, share: 0.4, values: points.map((one) => (one.index === undefined ? null : requests.ttft_s[one.index])) };
  const lines = requests.by_length.map((line, number) => ({
    name: `${line.percentile} % within`, colour: line.percentile === percentile ? "--ink" : "--dim", spans: true, points: false, dash: line.percentile === percentile ? undefined : [5, 4],
    values: points.map((one) => (one.line === number ? one.y : null)),
  }));
  const near = (index, number) => {
    const line = requests.by_length[number];
    if (!line.new_tokens.length) return "";
    const place = line.new_tokens.reduce((best, x, at) => (Math.abs(Math.log(x / points[index].x)) < Math.abs(Math.log(line.new_tokens[best] / points[index].x)) ? at : best), 0);
    return kv.seconds(line.ttft_s[place]);
  };
  kv.chart(document.getElementById("lengths"), {
    label: "TTFT by the length of the prompt", height: 320, xs: points.map((one) => one.x), series: [dots, ...lines], marks: [target()],
    x: { title: "new tokens (context less cached prefix)", format: (value) => (Number.isInteger(value) ? kv.tokens(value) : ""), log: 2 }, y: { title: "TTFT", format: kv.seconds, log: true },
    hover: (index) => [`${Math.round(points[index].x)} new tokens`, [
      ["TTFT", points[index].index === undefined ? "" : kv.seconds(requests.ttft_s[points[index].index])],
      ...requests.by_length.map((line, number) => [`${line.percentile} % near here`, near(index, number)])]],
  });
  window.kvQueue = { charts };
});
