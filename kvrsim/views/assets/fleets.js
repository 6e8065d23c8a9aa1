"use strict";
/* The fleets of a capacity plan: a target and a price are dragged, a percentile chosen, and the fleet is read off. */
kv.ready((data) => {
  const host = document.getElementById("fleets");
  if (!host || !data.tried) return;
  const percentiles = data.percentiles.filter((one) => one >= 50);
  const state = {
    percentile: data.percentile, target: data.slo_s, budget: null, price: data.price_per_gpu_hour,
  };
  const bySize = data.priced && data.price_per_gpu_hour === null;
  const priced = () => bySize || state.price !== null;
  const cost = (one) => (bySize ? one.cost : one.gpus * (state.price ?? 1));
  const at = (values) => values?.[data.percentiles.indexOf(state.percentile)] ?? null;
  const money = (value) => (priced() ? `$${Number(value.toPrecision(4))} per hour` : `${value} GPU${value === 1 ? "" : "s"}`);
  const busy = (one) => `${Math.round(100 * one.utilisation)} %`;

  // -- the front

  const known = () => data.tried.filter((one) => at(one.ttft_s) !== null);
  function front() {
    const found = [];
    for (const one of known().filter((fleet) => !data.sure || fleet.safe).sort((a, b) => cost(a) - cost(b) || at(a.ttft_s) - at(b.ttft_s))) {
      if (!found.length || at(one.ttft_s) < at(found[found.length - 1].ttft_s) * 0.99) found.push(one);
    }
    return found;
  }
  // With --sure, a fleet whose interval ends above the target of the question is not safe, and is no answer to it.
  const counts = (one) => !data.sure || one.safe || state.percentile !== data.percentile || state.target > data.slo_s * 1.001;
  // Whether the interval of the asked percentile, or the TPOT, is known to be above the target of the question.
  const isUnsafe = (one) => one.safe === false && state.percentile === data.percentile;
  const cheapest = () => known().filter((one) => counts(one) && at(one.ttft_s) <= state.target)
    .sort((a, b) => cost(a) - cost(b) || at(a.ttft_s) - at(b.ttft_s))[0] ?? null;
  const fastest = () => known().filter((one) => cost(one) <= state.budget * (1 + 1e-9))
    .sort((a, b) => at(a.ttft_s) - at(b.ttft_s))[0] ?? null;

  // -- what is moved

  const all = data.tried.map((one) => one.ttft_s[data.percentiles.indexOf(data.percentile)]).filter((one) => one !== null);
  const least = Math.min(data.slo_s, ...all) / 1.4;
  const most = Math.max(data.slo_s * 4, Math.min(Math.max(...all), 40 * Math.max(data.slo_s, Math.min(...all)))) * 1.2;
  const steps = Array.from({ length: 141 }, (_, index) => least * 1.1 * (most / least / 1.21) ** (index / 140));
  const targets = [...steps, data.slo_s].sort((a, b) => a - b);
  const budgets = () => [...new Set(data.tried.map(cost))].sort((a, b) => a - b);
  const nearest = (values, value) => values.reduce((best, one, index) => (Math.abs(Math.log(one / value)) < Math.abs(Math.log(values[best] / value)) ? index : best), 0);
  const first = cheapest() ?? front().slice(-1)[0];
  const dearer = first ? front().filter((one) => cost(one) > cost(first)) : [];
  state.budget = first ? cost(dearer[1] ?? dearer[0] ?? first) : budgets()[0];

  const target = kv.slider({ label: "Target TTFT", values: targets, format: (value) => kv.seconds(Number(value.toPrecision(3))), at: targets.indexOf(data.slo_s), moved: (index) => {
    state.target = targets[index];
    update();
  } });
  let prices = budgets();
  const budget = kv.slider({ label: "At most", values: prices, format: (value) => money(value), at: nearest(prices, state.budget), moved: (index) => {
    state.budget = prices[index];
    update();
  } });
  const percentile = kv.el("select", { on: { change: (event) => {
    state.percentile = Number(event.target.value);
    redraw();
  } } }, ...percentiles.map((one) => kv.el("option", { value: one, text: `${one} %`, selected: one === state.percentile })));
  const price = kv.el("input", { type: "number", min: "0", step: "any", inputmode: "decimal", value: state.price ?? "", placeholder: "none", on: { input: (event) => {
    const value = Number(event.target.value);
    state.price = event.target.value.trim() && value > 0 ? value : null;
    prices = budgets();
    budget.values(prices, nearest(prices, state.budget = cost(first ?? data.tried[0])));
    redraw();
  } } });
  const tools = kv.el("div", { class: "tools sliders" }, target.box, budget.box,
    kv.el("label", {}, "Of the requests", percentile), bySize ? null : kv.el("label", {}, "Price of a GPU-hour", price));
  const chartHost = kv.el("div", {});
  const said = kv.el("div", { id: "read-off", class: "cards", role: "status" });
  host.append(tools, said, chartHost);

  // -- the chart

  const targetMark = { axis: "y", value: state.target, text: (value) => `target ${kv.seconds(Number(value.toPrecision(3)))}`, drag: (value) => {
    const index = nearest(targets, Math.max(least, value));
    state.target = targetMark.value = targets[index];
    target.set(index);
    update();
  } };
  const budgetMark = { axis: "x", value: state.budget, text: (value) => `at most ${money(value)}`, drag: (value) => {
    const index = nearest(prices, Math.max(prices[0] / 2, value));
    state.budget = budgetMark.value = prices[index];
    budget.set(index);
    update();
  } };
  const rings = [];
  let shown = [];  // fleets beside xs
  function series() {
    const best = front();
    shown = known().sort((a, b) => cost(a) - cost(b) || at(b.ttft_s) - at(a.ttft_s));
    const held = (one) => {
      const here = best.filter((other) => cost(other) <= cost(one)).slice(-1)[0];
      return here ? at(here.ttft_s) : null;
    };
    const line = { name: priced() ? "the fastest at this price" : "the fastest with so many GPUs", colour: "--accent", step: true, points: false, values: shown.map((one) => held(one)) };
    const unsafe = { name: "not safe (target or TPOT)", colour: "--dim", line: false, size: 7, values: shown.map((one) => (isUnsafe(one) && at(one.ttft_s) <= most ? at(one.ttft_s) : null)) };
    const dots = { name: "fleets simulated", colour: "--ink", line: false, size: 7, values: shown.map((one) => (at(one.ttft_s) > most || isUnsafe(one) ? null : at(one.ttft_s))) };
    // A place of no fleet at each end, so that all percentiles have one axis.
    const drawn = [line, dots, unsafe];
    for (const one of drawn) one.values = [null, ...one.values, null];
    return [[prices[0] / 1.2, ...shown.map(cost), prices[prices.length - 1] * 1.2], drawn];
  }
  function words(one) {
    return [["TTFT", `${kv.seconds(at(one.ttft_s))} (${state.percentile} %)`], [data.decodes ? "GPUs, prefill and decoding" : "GPUs", String(one.gpus)],
      ["cost", priced() ? money(cost(one)) : ""], ["utilisation", busy(one)]];
  }
  const [xs, lines] = series();
  const chart = kv.chart(chartHost, {
    label: "Fleets: cost and TTFT. The sliders above move the target and the price.", height: 360, xs, series: lines, marks: [targetMark, budgetMark], rings,
    x: { title: `${priced() ? "$ per hour" : "GPUs"}, ${data.decodes ? "prefill and decoding" : "for prefill only"}`, format: (value) => String(Number(value.toPrecision(4))), log: 2, tight: true },
    y: { title: "TTFT", format: kv.seconds, log: true, least, most, tight: true },
    hover: (index) => (shown[index - 1] ? [shown[index - 1].fleet, words(shown[index - 1])] : ["", []]),
  });

  // -- what is read off

  function card(title, one, none) {
    if (!one) return kv.el("div", { class: "card" }, kv.el("h3", { text: title }), kv.el("p", { class: "bad", text: none }));
    return kv.el("div", { class: "card" },
      kv.el("h3", { text: title }),
      kv.el("p", { class: "answer" }, kv.el("strong", { text: `${one.gpus} GPU${one.gpus === 1 ? "" : "s"}` }), `${priced() ? `, ${money(cost(one))}` : ""}: ${one.fleet}`),
      kv.el("p", { text: `${state.percentile} % within ${kv.seconds(at(one.ttft_s))}. Busy ${busy(one)} of the time.` }),
      kv.el("p", { class: "lead", text: `${one.requests} requests simulated${data.samples > 1 ? `, in ${data.samples} samples` : ""}.` }));
  }
  function update() {
    const [within, paid] = [cheapest(), fastest()];
    const wanted = kv.seconds(Number(state.target.toPrecision(3)));
    said.replaceChildren(
      card(`Cheapest with ${state.percentile} % within ${wanted}`, within, "None of the fleets simulated meets the target."),
      card(`Fastest for at most ${money(state.budget)}`, paid, "None of the fleets simulated is as cheap."));
    rings.splice(0, 2, ...[within, paid].filter(Boolean).map((one) => ({ x: cost(one), y: at(one.ttft_s) })));
    targetMark.value = state.target;
    budgetMark.value = state.budget;
    chart.plot()?.redraw(false);
  }
  function redraw() {
    chart.set(...series());
    update();
  }

  update();
  window.kvFleets = { state, chart };
});
