"use strict";
/* kvrsim serve: the question in a form, the answer as it is searched, and pinned answers side by side.
 *
 * The address holds the view: #model=...&ctx=...&pin=QUESTION&pin=QUESTION, where QUESTION is a query of its own.
 */
kv.ready(() => {
  const form = document.getElementById("ask");
  const state = document.getElementById("state");
  const boxes = [...form.querySelectorAll("input")];
  const answers = new Map(); // query -> last line of its answer
  let pins = [];
  let asked = ""; // the query whose answer is shown
  let current = null; // AbortController of the search that runs

  const asQuery = () => new URLSearchParams(boxes.filter((box) => box.value.trim()).map((box) => [box.name, box.value.trim()])).toString();

  function writeAddress() {
    const parts = new URLSearchParams(asked);
    for (const pin of pins) parts.append("pin", pin);
    history.replaceState(null, "", `#${parts}`);
  }

  async function fetchAnswer(query, onProgress, signal) {
    if (answers.has(query)) return answers.get(query);
    const response = await fetch(`answer?${query}`, { signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    let last = { error: `the server answered ${response.status}` };
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += value;
      const lines = text.split("\n");
      text = lines.pop();
      for (const line of lines.filter(Boolean)) {
        last = JSON.parse(line);
        if (last.progress) onProgress(last.progress);
      }
    }
    if (last.plan) answers.set(query, last);
    return last;
  }

  const interval = (one) => `${kv.seconds(one.ttft_low_s)} to ${kv.seconds(one.ttft_high_s)}`;
  const peak = (one) => Math.max(...one.peak_bytes);

  function rows(plan) {
    const fitting = plan.strategies.filter((one) => one.fits);
    return (fitting.length ? fitting : plan.strategies).slice(0, 5).map((one) => [
      one.strategy, [kv.seconds(one.ttft_s), one.ttft_s], [interval(one), one.ttft_high_s], [kv.bytes(peak(one)), peak(one)],
      Object.keys(one.engines).join(", ") || "none",
    ]);
  }

  function show(query, line) {
    const top = document.getElementById("top");
    document.getElementById("best").textContent = line.error ? "" : line.answer;
    state.textContent = line.error || "";
    state.classList.toggle("bad", Boolean(line.error));
    if (line.error) {
      top.replaceChildren();
      return;
    }
    const columns = [["strategy", false], ["TTFT", true], ["interval", true], ["peak memory", true], ["engines", false]];
    top.replaceChildren(kv.table("The five fastest strategies that fit", columns, rows(line.plan)));
    form.dataset.answered = query;
  }

  async function ask() {
    current?.abort();
    current = new AbortController();
    asked = asQuery();
    writeAddress();
    state.classList.remove("bad");
    state.textContent = "searching ...";
    const query = asked;
    try {
      const line = await fetchAnswer(query, (text) => { state.textContent = `searching: ${text}`; }, current.signal);
      if (query !== asked) return;
      show(query, line);
      if (line.plan) frames();
    } catch (error) {
      if (error.name !== "AbortError") show(query, { error: "the server does not answer: is kvrsim serve still running?" });
    }
  }

  function frames() { // pages of the pinned answers, or of the answer that is shown
    const queries = pins.length > 1 ? pins : asked ? [asked] : [];
    const host = document.getElementById("frames");
    const had = new Map([...host.children].map((frame) => [frame.dataset.query, frame]));
    host.style.setProperty("--columns", Math.min(queries.length, 3) || 1);
    host.replaceChildren(...queries.map((query) => had.get(query)
      ?? kv.el("iframe", { src: `page?${query}`, title: `Details: ${query}`, dataset: { query } })));
  }

  function question(query) {
    return [...new URLSearchParams(query)].map(([name, value]) => `${name} ${value}`).join(", ") || "the default question";
  }

  async function listPins() {
    const host = document.getElementById("pins");
    document.getElementById("pinned").hidden = !pins.length;
    const lines = await Promise.all(pins.map((pin) => fetchAnswer(pin, () => {})));
    const best = Math.min(...lines.map((line) => line.plan?.best?.ttft_s ?? Infinity));
    const columns = [["question", false], ["best", false], ["TTFT", true], ["interval", true], ["over the fastest", true], ["", false]];
    const table = kv.table("Pinned answers", columns, lines.map((line, place) => {
      const one = line.plan?.best;
      const cells = one ? [one.strategy, [kv.seconds(one.ttft_s), one.ttft_s], [interval(one), one.ttft_high_s],
        [`${(one.ttft_s / best).toFixed(2)} ×`, one.ttft_s]] : [line.error ?? "nothing fits", "", "", ""];
      return [question(pins[place]), ...cells, ""];
    }));
    table.querySelectorAll("tbody tr").forEach((row, place) => row.lastElementChild.append(
      kv.el("button", { type: "button", text: "Remove", on: { click: () => {
        pins.splice(place, 1);
        changePins();
      } } })));
    host.replaceChildren(table);
  }

  function changePins() {
    writeAddress();
    listPins();
    frames();
  }

  function readAddress() {
    const parts = new URLSearchParams(location.hash.slice(1));
    pins = parts.getAll("pin");
    for (const box of boxes) box.value = parts.get(box.name) ?? "";
    listPins();
    ask();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  document.getElementById("pin").addEventListener("click", () => {
    if (!asked || pins.includes(asked)) return;
    pins.push(asked);
    changePins();
  });
  window.addEventListener("hashchange", readAddress);
  readAddress();
});
