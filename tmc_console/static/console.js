"use strict";
// Keyboard, copying, and the live chart. Every page works without this file.

const rows = () => [...document.querySelectorAll("table.rows tbody tr")].filter((row) => row.querySelector("a"));

function move(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.querySelector("tr.chosen"));
  const next = Math.min(Math.max(at + step, 0), all.length - 1);
  all.forEach((row, place) => row.classList.toggle("chosen", place === next));
  all[next].querySelector("a").focus();
  all[next].scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, dialog[open]")) return;
  const keys = document.getElementById("keys");
  if (event.key === "/") document.getElementById("find")?.focus();
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "?" && keys) keys.showModal();
  else return;
  event.preventDefault();
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1000);
});

const totals = document.getElementById("totals");
const chart = document.getElementById("chart");
if (totals && chart && window.uPlot) {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = { stroke: color("--text"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
  const data = [[], [], []];
  const last = () => data[0].at(-1) ?? Date.now() / 1000;
  const width = () => Math.max(chart.clientWidth, 200);
  const plot = new uPlot(
    {
      width: width(),
      height: 160,
      axes: [axis, axis],
      scales: { x: { range: () => [last() - 120, last()] }, y: { range: (_plot, _from, to) => [0, Math.max(to, 1)] } },
      series: [
        {},
        { label: chart.dataset.submitted, stroke: color("--accent"), width: 2 },
        { label: chart.dataset.acked, stroke: color("--green"), width: 2, dash: [6, 3] },
      ],
    },
    data,
    chart,
  );
  new ResizeObserver(() => plot.setSize({ width: width(), height: 160 })).observe(chart);
  const body = document.querySelector("#chart-table tbody");
  new EventSource(totals.dataset.events).onmessage = (event) => {
    const found = JSON.parse(event.data);
    for (const cell of totals.querySelectorAll("[data-total]")) cell.textContent = found[cell.dataset.total];
    [found.now / 1000, found.submitted, found.acked].forEach((value, place) => data[place].push(value));
    if (data[0].length > 300) data.forEach((series) => series.shift());
    plot.setData(data);
    const row = body.insertRow(0);
    [new Date(found.now).toISOString().slice(11, 19), found.submitted, found.acked].forEach((value) => {
      row.insertCell().textContent = value;
    });
    while (body.rows.length > 60) body.deleteRow(-1);
  };
}
