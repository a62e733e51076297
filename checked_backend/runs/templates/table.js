"use strict";
const body = document.querySelector("#cases tbody");
const rows = Array.from(body.rows);
const text = document.querySelector("#filter");
const picked = () => new Set(Array.from(document.querySelectorAll("#statuses input:checked"), (box) => box.value));
const shown = document.querySelector("#shown");

function filter() {
  const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
  const statuses = picked();
  let count = 0;
  for (const row of rows) {
    const content = row.textContent.toLowerCase();
    const fits = statuses.has(row.dataset.status) && words.every((word) => content.includes(word));
    row.hidden = !fits;
    count += fits ? 1 : 0;
  }
  shown.textContent = `${count} of ${rows.length} cases`;
}

function key(row, column) {
  const cell = row.cells[column];
  const number = cell.dataset.number;
  return number === undefined ? cell.textContent.trim().toLowerCase() : number === "" ? Infinity : Number(number);
}

document.querySelectorAll("#cases th button").forEach((button) => {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const down = head.getAttribute("aria-sort") === "ascending";
    document.querySelectorAll("#cases th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const column = head.cellIndex;
    const keyed = rows.map((row) => [key(row, column), row]);
    keyed.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
    body.append(...keyed.map(([, row]) => row));
  });
});
text.addEventListener("input", filter);
document.querySelector("#statuses").addEventListener("change", filter);
filter();
