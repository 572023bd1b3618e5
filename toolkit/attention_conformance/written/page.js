"use strict";
const levels = JSON.parse(document.getElementById("levels").textContent);
const rows = [...document.querySelectorAll("tr.row")];
const search = document.getElementById("search");
const boxes = [...document.querySelectorAll("#filters input[value]")];
const panel = (row) => row.nextElementSibling;
const opener = (row) => row.querySelector("button");
const texts = rows.map((row) => (row.textContent + " " + panel(row).textContent).toLowerCase());

function element(name, text, parent, attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function range(name, number, size) {
  return size === 1 ? `${name} ${number}` : `${name} ${number * size}–${number * size + size - 1}`;
}

function draw(map) {
  const { lines, result, rows: rowName, columns, block } = map.dataset;
  const [rowSize, columnSize] = block.split(",").map(Number);
  const cells = lines.split("/");
  const table = element("table", "", map);
  element("caption", `Largest error of ${result}, by ${rowName} and ${columns}`, table);
  const head = element("tr", "", element("thead", "", table));
  element("th", `${rowName} \\ ${columns}`, head, { scope: "col" });
  [...cells[0]].forEach((_, at) => element("th", at * columnSize, head, { scope: "col" }));
  const body = element("tbody", "", table);
  cells.forEach((line, number) => {
    const row = element("tr", "", body);
    element("th", number * rowSize, row, { scope: "row" });
    [...line].forEach((level, at) => {
      const title = `${range(rowName, number, rowSize)}, ${range(columns, at, columnSize)}: ${levels[level]}`;
      element("td", level === "0" ? "" : level, row, { class: `l${level}`, title });
    });
  });
  const legend = element("p", "", map, { class: "legend" });
  levels.forEach((told, level) => {
    element("span", "", legend, { class: `l${level}` });
    legend.append(level ? `${level}: ${told}` : told);
  });
}

function open(row, wanted) {
  opener(row).setAttribute("aria-expanded", wanted);
  panel(row).hidden = !wanted || row.hidden;
  const map = panel(row).querySelector(".map");
  if (wanted && map && !map.firstChild) draw(map);
}

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const verdicts = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  rows.forEach((row, at) => {
    row.hidden = !(verdicts.has(row.dataset.verdict) && words.every((word) => texts[at].includes(word)));
    panel(row).hidden = row.hidden || opener(row).getAttribute("aria-expanded") !== "true";
  });
  document.getElementById("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} findings`;
}

function step(by) {
  const shown = rows.filter((row) => !row.hidden);
  if (!shown.length) return;
  const at = shown.findIndex((row) => row.contains(document.activeElement) || panel(row).contains(document.activeElement));
  const next = at < 0 ? (by > 0 ? 0 : shown.length - 1) : Math.min(Math.max(at + by, 0), shown.length - 1);
  opener(shown[next]).focus();
}

async function copy(button) {
  const text = button.parentElement.querySelector("pre").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page from a file may not use the clipboard everywhere
    const area = element("textarea", text, button.parentElement);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

document.addEventListener("click", (event) => {
  if (event.target.matches(".copy")) copy(event.target);
  const row = event.target.closest("tr.row");
  if (row && event.target.matches("button")) open(row, panel(row).hidden);
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { search.value = ""; filter(); search.blur(); return; }
  if (event.target === search) {
    if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); step(1); }
    return;
  }
  if (event.key === "/") { event.preventDefault(); search.focus(); search.select(); }
  if (event.key === "j") step(1);
  if (event.key === "k") step(-1);
});
document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("filters").addEventListener("input", filter);
rows.forEach((row) => open(row, false));
filter();
