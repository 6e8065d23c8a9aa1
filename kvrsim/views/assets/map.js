"use strict";
/* The page of a map: who wins where, one place in full, and TTFT by context. */
kv.ready((data) => {
  const host = document.getElementById("map");
  if (!host) return;
  const { contexts, gpus, bandwidths, bandwidth_names: links, strategies, alone } = data;
  const winners = kvWinners(data);
  const kept = { c: contexts.length - 1, g: gpus.length - 1, b: bandwidths.length - 1 };
  let pointed = null;
  let by = "winner";
  let found = [];
  const name = (index) => strategies[index].name;
  const variable = (index) => kv.slug("strategy", name(index));
  const gpuWords = (count) => `${count} GPU${count === 1 ? "" : "s"}`;
  const shownPlace = () => pointed ?? kept;
  const numberOf = ({ b, c, g }) => winners.place(b, c, g);
  const ttft = (index, place) => strategies[index].ttft_s[place];
  const interval = (index, place) => `${kv.seconds(strategies[index].low_s[place])} to ${kv.seconds(strategies[index].high_s[place])}`;
  const lead = (one) => (one.lead === null ? "only" : one.ties.includes(one.second) ? "tie" : `+${share_of(one.lead)}`);
  const share_of = (value) => (value >= 1 ? `${(1 + value).toFixed(1)}×` : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`);
  const signed = (value) => (value >= 1 ? share_of(value) : `${value < 0 ? "−" : "+"}${share_of(Math.abs(value))}`);

  // -- what is shown

  const switches = kv.switches({
    label: "Strategies",
    options: strategies.map((one, index) => ({ key: index, text: one.name, colour: variable(index), title: one.title || undefined })),
    switched: refresh,
  });
  const colouring = kv.choice({
    label: "Colour by", chosen: by, changed: (key) => { by = key; draw(); },
    options: [["winner", "fastest"], ["lead", "lead over the second"], ["gpu_s", "GPU-seconds"]],
  });
  const scale = kv.el("div", { class: "ramp" });
  const grids = kv.el("div", { class: "grids" });
  host.append(kv.el("div", { class: "tools" }, colouring), switches.box, grids, scale);

  const sliders = {
    c: slider("Context", contexts, kv.tokens, "c"),
    g: slider("GPUs", gpus, gpuWords, "g"),
    b: slider("Links", bandwidths, (_, index) => links[index], "b"),
  };
  function slider(label, values, format, axis) {
    return kv.slider({ label, values, format, at: kept[axis], moved: (index) => {
      keep({ ...kept, [axis]: index });
      kv.say(said.textContent);
    } });
  }
  host.append(kv.el("div", { class: "tools sliders" }, ...Object.values(sliders).map((one) => one.box)));
  const said = kv.el("p", { class: "answer", id: "said" });
  const rows = kv.el("div", {});
  document.getElementById("place").append(said, rows);

  const domain = { lead: [0, 1], gpu_s: [0, 1] };
  function share(one) {
    const [low, high] = domain[by];
    if (by === "lead") return one.lead === null ? 1 : Math.sqrt(one.lead / (high || 1));
    return high > low ? Math.log(one.gpu_s / low) / Math.log(high / low) : 0.5;
  }
  function cell(place) {
    const one = found[place];
    if (!one) return null;
    const tie = one.ties.length ? " ≈" : "";
    const fill = by === "winner" ? kv.colour(variable(one.best)) : kvRamp(by === "lead" ? share(one) : 1 - share(one));
    const time = kv.seconds(ttft(one.best, place));
    const lines = { winner: [name(one.best), time + tie], lead: [lead(one), name(one.best)], gpu_s: [gpuSeconds(one.gpu_s).replace(" GPU-s", "") + tie, name(one.best)] };
    return { fill, lines: lines[by], mark: one.ties.length ? "≈" : "" };
  }
  const gpuSeconds = (value) => `${Number(value.toPrecision(3))} GPU-s`;

  const made = [];
  function grid(title, ident, yTitle, rowNames, at, chosen) {
    const inside = kv.el("div", { class: "chart", id: ident });
    const heading = kv.el("h3", {});
    grids.append(kv.el("div", {}, heading, inside));
    const drawn = kvGrid(inside, {
      label: `${title()}. Arrow keys move from place to place.`, xTitle: "context, tokens", yTitle, columns: contexts.map(kv.tokens), rows: rowNames,
      cell: (x, y) => cell(numberOf(at(x, y))),
      chosen,
      pointed: (x, y, event) => point(x === null ? null : at(x, y), event),
      picked: (x, y) => {
        keep(at(x, y));
        kv.say(said.textContent);
      },
    });
    made.push({ draw() { heading.textContent = title(); drawn.draw(); }, mark: drawn.mark });
  }
  if (gpus.length > 1 || bandwidths.length === 1) {
    grid(() => `Contexts and GPUs, links of ${links[kept.b]}`, "by-gpus", "GPUs", gpus.map(gpuWords),
      (x, y) => ({ c: x, g: y, b: kept.b }), () => [kept.c, kept.g]);
  }
  if (bandwidths.length > 1) {
    grid(() => `Contexts and links, ${gpuWords(gpus[kept.g])}`, "by-links", "links", links,
      (x, y) => ({ c: x, g: kept.g, b: y }), () => [kept.c, kept.b]);
  }

  // -- one place

  function point(place, event) {
    const same = place && pointed && numberOf(place) === numberOf(pointed);
    pointed = place;
    if (!place) kv.tip.hide();
    else {
      const number = numberOf(place);
      const one = found[number];
      const lines = one.ranked.slice(0, 4).map((index) => [name(index), kv.seconds(ttft(index, number)) + (strategies[index].fits[number] ? "" : ", does not fit")]);
      kv.tip.at(event.clientX, event.clientY, where(place), [...lines, ["lead", lead(one)], ["GPU-seconds", gpuSeconds(one.gpu_s)]]);
    }
    if (!same) explain();
  }
  function keep(place) {
    const moved = place.b !== kept.b || place.g !== kept.g;
    Object.assign(kept, place);
    pointed = null;
    for (const axis of ["c", "g", "b"]) sliders[axis].set(kept[axis]);
    for (const one of made) if (moved) one.draw(); else one.mark();
    explain();
  }
  const where = ({ b, c, g }) => `${kv.tokens(contexts[c])} tokens, ${gpuWords(gpus[g])}, links of ${links[b]}`;
  function sentence(place) {
    const one = found[numberOf(place)];
    if (!one) return `${where(place)}: none of the strategies that are on fits in memory.`;
    const number = numberOf(place);
    const winner = one.best === alone ? "one GPU" : name(one.best);
    const time = `${kv.seconds(ttft(one.best, number))} (80 % interval ${interval(one.best, number)})`;
    const faster = one.second === null ? "" : one.lead >= 1 ? `${share_of(one.lead)} as fast as` : `${share_of(one.lead)} faster than`;
    const margin = one.second === null ? (one.ranked.length > 1 ? "the only one that fits" : "the only one that is on")
      : one.ties.length ? `a tie with ${one.ties.map(name).join(", ")}` : `${faster} ${name(one.second)}`;
    return `${where(place)}: ${winner}, ${time}, ${margin}.`;
  }
  function bar(index, number, most) {
    const [low, mid, high] = ["low_s", "ttft_s", "high_s"].map((key) => strategies[index][key][number] / most);
    if (mid > 1) return kv.el("span", { class: "bar beyond", "aria-hidden": "true", text: "off the axis" });
    const inside = kv.el("span", { class: "interval" });
    inside.style.left = `${100 * low}%`;
    inside.style.width = `${100 * (Math.min(1, high) - low)}%`;
    const tick = kv.el("span", { class: "tick" });
    tick.style.left = `${100 * mid}%`;
    inside.style.backgroundColor = tick.style.backgroundColor = `var(${variable(index)})`;
    return kv.el("span", { class: "bar", "aria-hidden": "true" }, inside, tick);
  }
  function explain() {
    const place = shownPlace();
    const number = numberOf(place);
    const one = found[number];
    said.textContent = sentence(place);
    const most = one && Math.min(3 * ttft(one.best, number), Math.max(...one.ranked.map((index) => strategies[index].high_s[number])));
    const columns = [{ title: "strategy" }, { title: "TTFT", number: true }, { title: "80 % interval", number: true, second: true },
      { title: most && `0 to ${kv.seconds(most)}`, second: true }, { title: "against the fastest", number: true }, { title: "GPU-seconds", number: true, second: true }, { title: "fits" }, { title: "" }];
    const lines = (one?.ranked ?? []).map((index) => ({
      class: index === one.best ? "best" : undefined,
      cells: [
        kv.el("span", {}, kv.chip(variable(index)), name(index)),
        kv.seconds(ttft(index, number)),
        interval(index, number),
        bar(index, number, most),
        index === one.best ? "" : signed(ttft(index, number) / ttft(one.best, number) - 1),
        gpuSeconds(ttft(index, number) * (index === alone ? 1 : gpus[place.g])),
        strategies[index].fits[number] ? "yes" : kv.el("span", { class: "bad", text: "NO" }),
        index === one.best ? "fastest" : one.ties.includes(index) ? "tie" : "",
      ],
    }));
    rows.replaceChildren(kv.list(columns, lines, { caption: `Strategies: ${where(place)}`, ident: "ranking" }));
    lines_by_context(place);
  }
  // -- TTFT by context

  const now = { axis: "x", value: contexts[kept.c], text: (value) => kv.tokens(value) };
  const chartHost = document.getElementById("by-context");
  const over = kv.el("h3", {});
  chartHost.append(over);
  let chart = null;
  let drawn = "";
  function lines_by_context(place) {
    now.value = contexts[place.c];
    const fastest = found[numberOf(place)]?.best; // the band of one strategy can be read, those of all cannot
    const which = JSON.stringify([place.b, place.g, fastest, [...switches.on].sort()]);
    if (which === drawn) return chart?.plot()?.redraw(false);
    drawn = which;
    over.textContent = `${gpuWords(gpus[place.g])}, links of ${links[place.b]}`;
    const numbers = contexts.map((_, c) => winners.place(place.b, c, place.g));
    const column = (index, key) => numbers.map((number) => strategies[index][key][number]);
    const runs = strategies.map((_, index) => index).filter((index) => column(index, "ttft_s").some((value) => value !== null));
    const series = runs.map((index) => ({
      name: name(index), off: !switches.on.has(index), colour: variable(index), values: column(index, "ttft_s"), low: column(index, "low_s"), high: column(index, "high_s"), band: index === fastest, points: contexts.length < 24,
    }));
    const about = {
      label: "TTFT by context, one line a strategy", height: 340, xs: contexts, series, marks: [now],
      x: { title: "context, tokens", format: (value) => (Number.isInteger(value) ? kv.tokens(value) : ""), log: 2 }, y: { title: "TTFT", format: kv.seconds, log: true },
      switched: (label) => switches.turn(strategies.findIndex((one) => one.name === label)),
    };
    if (chart) return chart.set(contexts, series);
    chart = kv.chart(chartHost, about);
    return chart;
  }

  // -- all of it

  function legend() {
    if (by === "winner") {
      const parts = found.some((one) => one?.ties.length) ? ["≈: the fastest ties with another, the difference is within its prediction interval."] : [];
      if (found.some((one) => !one)) parts.push("Empty: none of these fits in memory.");
      return scale.replaceChildren(kv.el("p", { class: "lead", text: parts.join(" ") }));
    }
    const values = found.filter(Boolean).map((one) => one[by]).filter((value) => value !== null);
    domain[by] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
    const [low, high] = domain[by];
    const ends = by === "lead" ? ["0 %", `${share_of(high)} faster than the second; only: no other fits`] : [gpuSeconds(low), `${gpuSeconds(high)} (GPU-seconds: TTFT times GPUs)`];
    const strip = kv.el("span", { class: "strip", "aria-hidden": "true" }, ...Array.from({ length: 24 }, (_, index) => {
      const block = kv.el("span", {});
      block.style.backgroundColor = kvRamp(by === "lead" ? index / 23 : 1 - index / 23);
      return block;
    }));
    return scale.replaceChildren(kv.el("span", { text: ends[0] }), strip, kv.el("span", { text: ends[1] }));
  }
  function draw() {
    legend();
    for (const one of made) one.draw();
  }
  function refresh() {
    found = winners.all(switches.on);
    strategies.forEach((_, index) => {
      const wins = found.filter((one) => one?.best === index).length;
      switches.note(index, wins ? String(wins) : "");
    });
    draw();
    explain();
  }
  kv.onTheme(draw);
  found = winners.all(switches.on);
  const fitting = contexts.map((_, c) => c).filter((c) => found[numberOf({ ...kept, c })]);
  kept.c = fitting[Math.ceil((fitting.length - 1) / 2)] ?? kept.c;
  sliders.c.set(kept.c);
  refresh();
  window.kvMap = { winners: () => found, kept, pointed: () => pointed };
});
