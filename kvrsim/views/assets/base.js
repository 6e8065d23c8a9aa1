"use strict";
/* What scripts of pages use.
 *
 * kv.ready(draw)             calls draw(data) once the page's data are there; when all such calls are over, the root element
 *                            has data-drawn="true"
 * kv.onTheme(draw)           calls draw() when the reader switches between light and dark, and before and after printing
 * kv.colour(name)            the value of a CSS variable, such as "--ink"
 * kv.slug(group, name)       the CSS variable of a strategy or operation: kv.slug("strategy", "kvr-s") is "--strategy-kvr-s"
 * kv.el(tag, about, ...kids) an element; about: {class, text, dataset, on: {click: f}, any attribute}; kids: nodes or texts
 * kv.chip(variable)          a small square in a colour
 * kv.inkOn(red, green, blue)   the colour of text on a colour
 * kv.seconds(s), kv.bytes(b), kv.tokens(n), kv.percent(x)   in words, with the units of the command line
 * kv.tip.at(x, y, title, rows)   shows the tooltip at a point of the window; rows: [[label, text], ...]
 * kv.tip.hide()
 * kv.say(text)               tells a screen reader
 * kv.fit(host, draw)         calls draw(width) now and when the element's width changes
 * kv.soon(draw)              a function that lets draw() run once before the next frame; at once where the page is printed
 * kv.canvas(canvas, w, h)    sizes a canvas for the screen's density; returns its context, scaled to CSS pixels
 * kv.view.set(name, value)    keeps in the address what the reader has chosen; null: the default
 * kv.view.keep(name, restore) calls restore(value) once the page is drawn, where the address has a value of this name
 * kv.plain(words)             words as a name in an address or of a file
 * kv.view.all()               the choices, as URLSearchParams
 * kv.picture(host, name)      adds a button to an element that saves it as PNG
 * kv.table(caption, columns, rows)   a table that can be sorted; columns: [[title, isNumber], ...]; cells: text or [text, value]
 * Tables of class "sortable" are sorted by their heads; rows keep their elements. Each table has a button that saves it as CSV.
 */
const kv = (() => {
  const root = document.documentElement;
  const painters = [];

  function el(name, about = {}, ...kids) {
    const made = name === "svg" || about.svg
      ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(about)) {
      if (value === undefined || value === null || value === false || key === "svg") continue;
      if (key === "text") made.textContent = value;
      else if (key === "on") for (const [event, heard] of Object.entries(value)) made.addEventListener(event, heard);
      else if (key === "dataset") Object.assign(made.dataset, value);
      else made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...kids.filter((kid) => kid !== null && kid !== undefined));
    return made;
  }

  // -- words

  function rounded(value) { // three significant digits
    const size = Math.abs(value);
    return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
  }
  function scaled(value, units) {
    const [size, unit] = units.find(([least]) => Math.abs(value) >= least * 0.9995) ?? units[units.length - 1];
    return `${rounded(value / size)} ${unit}`;
  }
  const seconds = (value) => (value === 0 ? "0 s" : scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]));
  const bytes = (value) => (Math.abs(value) < 1024 ? `${value.toFixed(0)} B`
    : scaled(value, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]));
  const tokens = (value) => {
    if (value && value % 2 ** 20 === 0) return `${value / 2 ** 20}M`;
    return value >= 2 ** 10 && value % 2 ** 9 === 0 && value < 2 ** 20 ? `${value / 2 ** 10}k` : String(value);
  };
  const percent = (share) => `${rounded(100 * share)} %`;

  // -- colours

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = dark.matches ? "dark" : "light";
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const slug = (group, name) => `--${group}-${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "")}`;
  function inkOn(...parts) { // black or white, whichever is easier to read on a colour of red, green and blue, 0 to 255
    const [red, green, blue] = parts.map((part) => (part / 255) ** 2.2);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000000" : "#ffffff";
  }
  function chip(variable) {
    const made = el("span", { class: "chip", "aria-hidden": "true" });
    made.style.backgroundColor = `var(${variable})`;
    return made;
  }
  function paint(wanted) {
    root.dataset.theme = wanted;
    const button = document.getElementById("kv-theme");
    if (button) {
      button.setAttribute("aria-pressed", String(wanted === "dark"));
      button.title = wanted === "dark" ? "Switch to light colours" : "Switch to dark colours";
    }
    for (const painter of painters) painter();
  }
  window.addEventListener("message", ({ origin, data }) => origin === location.origin && data.theme && paint(theme = data.theme));
  dark.addEventListener("change", () => paint(theme = dark.matches ? "dark" : "light"));
  let printing = false;
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details.question").forEach((one) => { one.open = true; });
    printing = true;
    paint("light");
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    paint(theme);
  });
  function soon(draw) {
    let asked = false;
    return () => {
      if (printing) draw();
      else if (!asked) {
        asked = true;
        requestAnimationFrame(() => {
          asked = false;
          draw();
        });
      }
    };
  }
  root.dataset.theme = theme;

  // -- the tooltip and what is said

  const tip = {
    at(x, y, title, rows) {
      const box = document.getElementById("kv-tip");
      const lines = rows.filter(([, value]) => value).map(([label, value]) =>
        el("tr", {}, el("th", { scope: "row", text: label }), el("td", { text: value })));
      box.replaceChildren(el("strong", { text: title }), el("table", {}, el("tbody", {}, ...lines)));
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      const left = x + 14 + width > innerWidth - 8 ? Math.max(8, x - 14 - width) : x + 14;
      const top = y + 16 + height > innerHeight - 8 ? Math.max(8, y - 12 - height) : y + 16;
      box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    },
    hide() { document.getElementById("kv-tip").hidden = true; },
  };
  const say = (words) => { document.getElementById("kv-said").textContent = words; };

  // -- the view in the address

  const chosen = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const first = new URLSearchParams(chosen); // as the page was opened
  const restores = [];
  let write = null;
  const view = {
    all: () => chosen,
    set(name, value) {
      if (root.dataset.drawn !== "true") return; // nobody has chosen yet
      if (value === null) chosen.delete(name);
      else chosen.set(name, value);
      clearTimeout(write); // browsers refuse more than some changes a second
      write = setTimeout(() => {
        if (!/^(http|file)/.test(location.protocol)) return; // inside a notebook
        history.replaceState(null, "", `#${chosen}`);
        if (parent !== window) parent.postMessage({ page: location.search, view: String(chosen) }, location.origin);
      }, 120);
    },
    keep: (name, restore) => first.has(name) && restores.push(() => restore(first.get(name))),
  };
  window.addEventListener("hashchange", () => location.hash.includes("=") && location.reload());

  // -- files

  function save(name, content) {
    const link = el("a", { href: URL.createObjectURL(content), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1e4);
  }
  const plain = (words) => words.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
  const fileName = (words, suffix) => `${plain(words)}.${suffix}`;
  /* An element with all that it holds, drawn as the browser draws it. */
  async function png(host) {
    const copy = host.cloneNode(true);
    const [from, to] = [host, copy].map((one) => [one, ...one.querySelectorAll("*")]);
    from.forEach((one, index) => {
      const look = getComputedStyle(one);
      for (const name of look) to[index].style.setProperty(name, look.getPropertyValue(name));
      if (one.tagName === "CANVAS") {
        const image = el("img", { src: one.toDataURL() });
        image.style.cssText = to[index].style.cssText;
        to[index].replaceWith(image);
      }
    });
    copy.querySelectorAll(".only-screen").forEach((one) => one.remove());
    Object.assign(copy.style, { margin: "0", display: "flow-root", background: colour("--card") });
    const { width, height } = host.getBoundingClientRect();
    const svg = el("svg", { svg: true, width, height }, el("foreignObject", { svg: true, width: "100%", height: "100%" }, copy));
    const image = el("img", { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}` });
    await image.decode();
    const drawn = el("canvas");
    canvas(drawn, width, height).drawImage(image, 0, 0);
    return new Promise((done) => { drawn.toBlob(done); });
  }
  const button = (text, title, clicked) => el("button", { type: "button", class: "save only-screen", text, title, on: { click: clicked } });
  function picture(host, name) {
    host.append(button("PNG", `Save as a picture: ${name}`, async () => save(fileName(name, "png"), await png(host))));
  }
  /* One number with a unit becomes seconds or bytes; other texts stay, without marks. */
  function csv(table) {
    const isNumber = /^[\d.]+ ?(s|ms|us|ns|B|[KMGT]iB|×|%)?$/;
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => {
      const [text, value] = [cell.textContent.trim(), cell.dataset.value];
      return value && (Number.isNaN(Number(value)) || isNumber.test(text)) ? value : text;
    }));
    const units = [[/ (s|ms|us|ns)$/, " (s)"], [/ ([KMGT]i)?B$/, " (bytes)"]];
    const heads = [...table.tHead.rows[0].cells].map((head, column) => {
      const shown = [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim()).find((text) => isNumber.test(text)) ?? "";
      return head.textContent.trim() + (units.find(([unit]) => unit.test(shown))?.[1] ?? "");
    });
    return [heads, ...rows].map((row) => row.map((text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)).join(",")).join("\n");
  }
  /* A button that saves a table. */
  function csvButton(table) {
    const name = table.caption?.textContent ?? "table";
    return button("CSV", `Save as a table: ${name}`, () => save(fileName(name, "csv"), new Blob([`${csv(table)}\n`], { type: "text/csv" })));
  }

  // -- sizes

  function fit(host, draw) {
    let width = 0;
    const look = () => {
      const now = Math.floor(host.clientWidth);
      if (now > 0 && now !== width) draw(width = now);
    };
    new ResizeObserver(() => requestAnimationFrame(look)).observe(host);
    look();
  }
  function canvas(made, width, height) {
    const density = Math.min(2, window.devicePixelRatio || 1);
    made.width = Math.round(width * density);
    made.height = Math.round(height * density);
    made.style.width = `${width}px`;
    made.style.height = `${height}px`;
    const context = made.getContext("2d");
    context.setTransform(density, 0, 0, density, 0, 0);
    return context;
  }

  // -- tables

  function key(row, column) {
    const cell = row.cells[column];
    const value = cell.dataset.value ?? cell.textContent;
    const number = value.trim() === "" ? NaN : Number(value);
    return { value, number, missing: value.trim() === "" };
  }
  function sort(table, column, ascending) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [key(row, column), row]);
    const numbers = rows.every(([k]) => k.missing || !Number.isNaN(k.number));
    rows.sort(([a], [b]) => {
      if (a.missing || b.missing) return a.missing - b.missing;
      const order = numbers ? a.number - b.number : a.value.localeCompare(b.value, "en", { numeric: true });
      return ascending ? order : -order;
    });
    body.append(...rows.map(([, row]) => row));
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      if (index === column) head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    say(`Sorted by ${table.tHead.rows[0].cells[column].textContent}, ${ascending ? "ascending" : "descending"}`);
  }
  function sortable(table) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const name = head.textContent;
      if (!name.trim()) return;
      const button = el("button", { type: "button", text: name, title: head.title || undefined });
      button.addEventListener("click", () => sort(table, column, head.getAttribute("aria-sort") !== "ascending"));
      head.replaceChildren(button);
    });
  }

  function tableOf(caption, columns, rows) {
    const look = (index) => (columns[index][1] ? "number" : undefined);
    const heads = columns.map(([title], index) => el("th", { scope: "col", class: look(index), text: title }));
    const cell = (content, index) => (Array.isArray(content)
      ? el("td", { class: look(index), text: content[0], "data-value": String(content[1]) })
      : el("td", { class: look(index), text: content }));
    const made = el("table", { class: "sortable" }, el("caption", { class: "hidden", text: caption }),
      el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell)))));
    sortable(made);
    return inBox(made);
  }
  const inBox = (made) => el("div", {}, el("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": made.caption.textContent }, made), csvButton(made));

  // -- data

  async function data() {
    const held = atob(document.getElementById("kv-data").textContent);
    const packed = Uint8Array.from(held, (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }
  let held;
  let waiting = 0;
  function ready(draw) {
    held ??= data();
    waiting += 1;
    root.dataset.drawn = false;
    held.then(draw).then(() => {
      waiting -= 1;
      if (waiting === 0) restores.splice(0).forEach((restore) => restore());
      root.dataset.drawn = waiting === 0;
      performance.mark("kv-drawn");
    }).catch((error) => {
      document.getElementById("content").prepend(
        el("p", { class: "broken", role: "alert", text: `The pictures of this page cannot be drawn: ${error.message}` }));
      throw error;
    });
  }

  root.dataset.drawn = true; // until a script asks for data
  if ("framed" in root.dataset && parent !== window) { // the page around this one gives it the height that it needs
    const tell = () => parent.postMessage({ height: document.body.scrollHeight }, location.origin);
    new ResizeObserver(() => requestAnimationFrame(tell)).observe(document.body);
  }
  document.getElementById("kv-theme").addEventListener("click", () => paint(theme = theme === "dark" ? "light" : "dark"));
  paint(theme);
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll(".scrolls > table").forEach((table) => table.parentElement.after(csvButton(table)));
  const command = document.getElementById("command");
  if (command && navigator.clipboard) {
    const copy = el("button", { type: "button", class: "only-screen", text: "Copy", title: "Copy the command" });
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.textContent);
      say("Copied");
      copy.textContent = "Copied";
    });
    command.after(copy);
  }

  return {
    ready, el, chip, colour, inkOn, slug, seconds, bytes, tokens, percent, tip, say, fit, canvas, soon, plain, view, picture, csv, inBox, table: tableOf,
    onTheme: (painter) => painters.push(painter),
  };
})();
