"use strict";
/* kvrsim serve: the question in a form, the answer as it is searched, and pinned answers compared.
 *
 * The address holds all of it: #model=...&ctx=...&pin=QUESTION&pin=QUESTION&view=VIEW, where QUESTION is a query of its own
 * and VIEW is what the reader has chosen on the answer's page.
 */
kv.ready(() => {
  const form = document.getElementById("ask");
  const state = document.getElementById("state");
  const top = document.getElementById("top");
  const boxes = [...form.querySelectorAll("input")];
  const first = new URLSearchParams(location.hash.slice(1));
  let pins = first.getAll("pin");
  let view = first.get("view") ?? "";
  let asked = ""; // the query whose answer is shown
  let current = null; // AbortController of the search that runs
  for (const box of boxes) box.value = first.get(box.name) ?? "";

  const asQuery = () => new URLSearchParams(boxes.filter((box) => box.value.trim()).map((box) => [box.name, box.value.trim()])).toString();
  const words = (query) => [...new URLSearchParams(query)].map(([name, value]) => `${name} ${value}`).join(", ") || "the default question";

  function writeAddress() {
    const parts = new URLSearchParams(asked);
    for (const pin of pins) parts.append("pin", pin);
    if (view) parts.set("view", view);
    history.replaceState(null, "", `#${parts}`);
  }

  async function* lines(query, signal) {
    const response = await fetch(`answer?${query}`, { signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (text + value).split("\n");
      text = whole.pop();
      for (const line of whole.filter(Boolean)) yield JSON.parse(line);
    }
  }

  // -- the answer

  function say(answer) {
    document.getElementById("best").replaceChildren(...answer.split("\n").filter(Boolean).map((text) => kv.el("p", { class: "answer", text })));
  }
  function showSoFar(candidates) {
    const some = [...candidates.values()].sort((one, other) => other.fits - one.fits || one.ttft_s - other.ttft_s).slice(0, 5);
    say(some[0].fits ? `So far: ${some[0].strategy}, ${kv.seconds(some[0].ttft_s)}.` : "So far nothing fits.");
    top.replaceChildren(kv.table("The fastest strategies so far", [["strategy", false], ["TTFT", true], ["fits", false]],
      some.map((one) => [one.strategy, [kv.seconds(one.ttft_s), one.ttft_s], one.fits ? "yes" : "no"])));
  }
  function show({ answer, plan }) {
    const fitting = plan.strategies.filter((one) => one.fits);
    const columns = [["strategy", false], ["TTFT", true], ["interval", true], ["peak memory", true], ["engines", false]];
    const rows = (fitting.length ? fitting : plan.strategies).slice(0, 5).map((one) => {
      const peak = Math.max(...one.peak_bytes);
      return [one.strategy, [kv.seconds(one.ttft_s), one.ttft_s], [`${kv.seconds(one.ttft_low_s)} to ${kv.seconds(one.ttft_high_s)}`, one.ttft_high_s],
        [kv.bytes(peak), peak], Object.keys(one.engines).join(", ") || "none"];
    });
    say(answer);
    top.replaceChildren(kv.table("The five fastest strategies that fit", columns, rows));
    state.textContent = "";
    form.dataset.answered = asked;
    frame("details-page", `page?${asked}${view && `#${view}`}`); // an empty fragment would scroll to the frame
  }
  function fail(text) {
    say("");
    top.replaceChildren();
    state.textContent = text;
    state.classList.add("bad");
  }
  async function ask() {
    current?.abort();
    const { signal } = current = new AbortController();
    if (asQuery() !== asked) view = asked ? "" : view;
    asked = asQuery();
    writeAddress();
    state.classList.remove("bad");
    state.textContent = "searching ...";
    const candidates = new Map();
    let isOver = false;
    try {
      for await (const line of lines(asked, signal)) {
        if (line.progress) state.textContent = `searching: ${line.progress}`;
        if (line.candidate) showSoFar(candidates.set(line.candidate.strategy, line.candidate));
        if (line.plan) show(line);
        if (line.error) fail(line.error);
        isOver = Boolean(line.plan || line.error);
      }
      if (!isOver) fail("the server ended the answer early");
    } catch (error) {
      if (error.name !== "AbortError") fail("the server does not answer: is kvrsim serve still running?");
    }
  }

  // -- pages inside this one

  function frame(ident, src) {
    const host = document.getElementById(ident);
    if (host.firstElementChild?.getAttribute("src").split("#")[0] === src.split("#")[0]) return;
    host.replaceChildren(kv.el("iframe", { src, title: words(src.split(/[?#]/)[1]), on: { load: paint } }));
  }
  function paint() {
    for (const { contentWindow } of document.querySelectorAll("iframe")) contentWindow.postMessage({ theme: document.documentElement.dataset.theme }, location.origin);
  }
  kv.onTheme(paint);
  window.addEventListener("message", ({ origin, data }) => {
    if (origin !== location.origin || data.page !== document.querySelector("#details-page iframe")?.contentWindow.location.search) return;
    view = data.view;
    writeAddress();
  });

  // -- pins

  function listPins() {
    writeAddress();
    document.getElementById("pinned").hidden = !pins.length;
    document.getElementById("pins").replaceChildren(...pins.map((pin) => kv.el("li", {}, `${words(pin)} `,
      kv.el("button", { type: "button", text: "Remove", on: { click: () => {
        pins = pins.filter((one) => one !== pin);
        listPins();
      } } }))));
    if (pins.length > 1) frame("compared", `compare?${new URLSearchParams(pins.map((pin) => ["pin", pin]))}`);
    else document.getElementById("compared").replaceChildren();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  form.addEventListener("change", () => asQuery() !== asked && ask());
  document.getElementById("pin").addEventListener("click", () => {
    if (asked && !pins.includes(asked)) pins.push(asked);
    listPins();
  });
  ask();
  listPins();
});
