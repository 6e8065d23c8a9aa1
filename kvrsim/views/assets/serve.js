"use strict";
/* kvrsim serve: the question in a form, the answer as it is searched, and pinned answers compared.
 *
 * The address holds all of it: #model=...&ctx=...&pin=QUESTION&pin=QUESTION&view=VIEW, where QUESTION is a query of its own
 * and VIEW is what the reader has chosen on the answer's page. An address without a question is the example in the form.
 */
kv.ready(() => {
  const part = (ident) => document.getElementById(ident);
  const form = part("ask");
  const state = part("state");
  const boxes = [...form.querySelectorAll("input")];
  const first = new URLSearchParams(location.hash.slice(1));
  const isAsked = boxes.some((box) => first.has(box.name));
  const examples = new Map(boxes.map((box) => [box.name, box.placeholder]));
  let pins = first.getAll("pin");
  let view = first.get("view") ?? "";
  let asked = null; // the query of the answer that is shown or searched
  let current = null; // AbortController of the answer that is read
  if (isAsked) for (const box of boxes) box.value = first.get(box.name) ?? "";
  part("more").open = boxes.some((box) => box.closest("#more") && box.value);

  const asQuery = () => new URLSearchParams(boxes.filter((box) => box.value.trim()).map((box) => [box.name, box.value.trim()])).toString();
  const labels = new Map(boxes.map((box) => [box.name, box.parentElement.firstChild.textContent]));
  const words = (query) => [...new URLSearchParams(query)].map(([name, value]) => `${labels.get(name) ?? name} ${value}`).join(", ");

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

  function clear() {
    for (const ident of ["best", "advice", "top", "ties", "launches", "details-page"]) part(ident).replaceChildren();
    for (const box of boxes) box.removeAttribute("aria-invalid");
    part("answer").hidden = true;
    part("details").hidden = true;
    state.classList.remove("bad");
  }
  function say(sentences) {
    part("answer").hidden = false;
    part("best").replaceChildren(
      ...sentences.map((text) => kv.el("p", { class: "answer", text })), kv.el("p", { id: "asked", text: words(asked) }));
  }
  function showSoFar(candidates) {
    const some = [...candidates.values()].sort((one, other) => other.fits - one.fits || one.ttft_s - other.ttft_s).slice(0, 5);
    say([some[0].fits ? `So far: ${some[0].strategy}, ${kv.seconds(some[0].ttft_s)}.` : "So far nothing fits."]);
    part("top").replaceChildren(kv.table("The fastest strategies so far", [["strategy", false], ["TTFT", true], ["fits", false]],
      some.map((one) => [one.strategy, [kv.seconds(one.ttft_s), one.ttft_s], one.fits ? "yes" : "no"])));
  }
  function show({ sentences, advice, columns, rows, ties, launches, used }) {
    say(sentences);
    part("advice").replaceChildren(...advice.map(({ text, fields }) => kv.el("button", {
      type: "button", text, title: "Ask this question", on: { click: () => change(fields) } })));
    part("top").replaceChildren(kv.table("Strategies", columns, rows));
    part("ties").replaceChildren(kv.el("p", { class: "hint", text: ties ?? "" }));
    part("launches").replaceChildren(...launches.map(launch));
    for (const box of boxes) box.placeholder = used[box.name] ?? examples.get(box.name);
    state.textContent = "";
    form.dataset.answered = asked;
  }
  function launch({ engine, version, strategy, command, files = {}, notes = [], refused }) {
    if (refused) return kv.el("p", { class: "hint", text: `${engine}: ${refused}` });
    const copy = kv.el("button", { type: "button", class: "save", text: "Copy", title: "Copy the command", on: { click: async () => {
      await navigator.clipboard.writeText(command);
      kv.say("Copied");
      copy.textContent = "Copied";
    } } });
    const texts = Object.entries(files).map(([name, text]) => kv.el("div", {}, kv.el("h3", { text: name }), kv.el("pre", { class: "mono", text })));
    return kv.el("details", {}, kv.el("summary", { text: `Launch ${strategy} on ${engine} ${version}` }),
      kv.el("pre", { class: "mono command-line", text: command }), copy, ...texts,
      kv.el("ul", {}, ...notes.map((text) => kv.el("li", { text }))));
  }
  function fail({ error, field }) {
    clear();
    state.textContent = error;
    state.classList.add("bad");
    boxes.find((box) => box.name === field)?.setAttribute("aria-invalid", "true");
  }
  function change(fields) { // values of fields by name
    for (const box of boxes) if (box.name in fields) box.value = fields[box.name];
    ask();
  }
  async function ask() {
    current?.abort();
    const { signal } = current = new AbortController();
    if (asQuery() !== asked) view = asked === null ? view : "";
    asked = asQuery();
    writeAddress();
    clear();
    state.textContent = "searching ...";
    const candidates = new Map();
    const seen = new Set();
    try {
      for await (const line of lines(asked, signal)) {
        const [kind] = Object.keys(line);
        seen.add(kind);
        if (kind === "progress") state.textContent = `searching: ${line.progress}`;
        if (kind === "candidate") showSoFar(candidates.set(line.candidate.strategy, line.candidate));
        if (kind === "answer") {
          show(line.answer);
          details(kv.el("p", { class: "lead", text: "drawing the timelines ..." }));
        }
        if (kind === "page") frame("details-page", `page?${asked}${view && `#${view}`}`); // an empty fragment would scroll to the frame
        if (kind === "no_page") details(kv.el("p", { class: "lead", text: line.no_page }));
        if (kind === "error") fail(line);
      }
      if (!seen.has("answer") && !seen.has("error")) fail({ error: "the server ended the answer early" });
    } catch (error) {
      if (error.name !== "AbortError") fail({ error: "the server does not answer: is kvrsim serve still running?" });
    }
  }
  function details(content) {
    part("details").hidden = false;
    part("details-page").replaceChildren(content);
  }

  // -- pages inside this one

  function frame(ident, src) {
    const host = part(ident);
    host.closest("section").hidden = false;
    if (host.querySelector("iframe")?.getAttribute("src").split("#")[0] === src.split("#")[0]) return;
    const wait = kv.el("p", { class: "lead", text: "waiting for the answer ..." });
    const inner = kv.el("iframe", { src, title: words(src.split(/[?#]/)[1]), on: { load: () => {
      wait.remove();
      paint();
    } } });
    host.replaceChildren(wait, inner);
  }
  const frames = () => [...document.querySelectorAll("iframe")];
  function paint() {
    for (const { contentWindow } of frames()) contentWindow.postMessage({ theme: document.documentElement.dataset.theme }, location.origin);
  }
  kv.onTheme(paint);
  window.addEventListener("message", ({ origin, source, data }) => {
    const inner = frames().find((one) => one.contentWindow === source);
    if (origin !== location.origin || !inner) return;
    if (data.height) inner.style.height = `${data.height}px`;
    if (data.view !== undefined && inner.closest("#details-page")) {
      view = data.view;
      writeAddress();
    }
  });

  // -- pins

  function listPins() {
    writeAddress();
    part("pinned").hidden = !pins.length;
    part("pins").replaceChildren(...pins.map((pin) => kv.el("li", {}, `${words(pin)} `,
      kv.el("button", { type: "button", text: "Ask", on: { click: () => {
        const query = new URLSearchParams(pin);
        for (const box of boxes) box.value = query.get(box.name) ?? "";
        ask();
      } } }), " ",
      kv.el("button", { type: "button", text: "Remove", on: { click: () => {
        pins = pins.filter((one) => one !== pin);
        listPins();
      } } }))));
    if (pins.length > 1) frame("compared", `compare?${new URLSearchParams(pins.map((pin) => ["pin", pin]))}`);
    else part("compared").replaceChildren(kv.el("p", { class: "lead", text: "Pin a second question to compare both." }));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  form.addEventListener("change", () => asQuery() !== asked && ask());
  part("pin").addEventListener("click", () => {
    if (asQuery() !== asked) ask();
    if (!pins.includes(asked)) pins.push(asked);
    listPins();
  });
  part("clear").addEventListener("click", () => {
    for (const box of boxes) box.value = box.defaultValue;
    ask();
  });
  ask();
  listPins();
});
