// The memory line: who has which bytes, stacked, against the budget and what the system counts.

import { html, useEffect, useRef } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";
import { dark, size, styled } from "./format.js";

const SPAN_S = 60;
const TICK_MS = 500;
const HEIGHT = 220;
// Steps of the axis that are round in bytes.
const BINARY = Array.from({ length: 34 }, (_, power) => 2 ** (power + 10));
// From the bottom up.
export const OWNERS = [
  ["weights", "Weights", "--weights"],
  ["held", "KV in use", "--held"],
  ["pinned", "KV pinned", "--pinned"],
  ["cached", "KV cached", "--cached"],
  ["free", "KV free", "--free"],
  ["states", "Snapshots, states", "--states"],
];

const owned = (memory, owner) => memory[owner] + (owner === "states" ? memory.snapshots : 0);

// What the line shows: times, and a column for each series. Filled by the clock, also while nothing changes.
class History {
  constructor() {
    this.columns = Array.from({ length: OWNERS.length + 3 }, () => []);
  }

  add(time, memory) {
    const sums = [];
    OWNERS.reduce((sum, [owner]) => (sums.push(sum + owned(memory, owner)), sums.at(-1)), 0);
    // The largest first: each is painted over by those below it.
    [time, ...sums.reverse(), memory.footprint, memory.budget].forEach((value, i) => this.columns[i].push(value));
    while (this.columns[0][0] < time - SPAN_S - 5) this.columns.forEach((column) => column.shift());
  }
}

const history = new History();
let latest = null;
setInterval(() => latest && history.add(Date.now() / 1000, latest), TICK_MS);

function options(width) {
  const line = styled("--line");
  const text = { stroke: styled("--muted"), font: `12px ${styled("--font")}`, ticks: { show: false } };
  const now = () => Date.now() / 1000;
  const areas = OWNERS.toReversed().map(([, label, colour]) => ({
    label,
    fill: styled(colour),
    width: 0,
    points: { show: false },
  }));
  return {
    width,
    height: HEIGHT,
    padding: [8, 8, 0, 0],
    cursor: { show: false },
    legend: { show: false },
    scales: {
      x: { time: false, range: () => [now() - SPAN_S, now()] },
      y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.08] },
    },
    axes: [
      {
        ...text,
        size: 26,
        grid: { show: false },
        splits: () => [40, 20].map((age) => now() - age),
        values: () => ["40 s ago", "20 s ago"],
      },
      {
        ...text,
        size: 72,
        gap: 8,
        space: 44,
        grid: { stroke: line, width: 1 },
        incrs: BINARY,
        values: (_, ticks) => ticks.map(size),
      },
    ],
    series: [
      {},
      ...areas,
      { label: "Process", stroke: styled("--text"), width: 1.5, points: { show: false } },
      { label: "Budget", stroke: styled("--muted"), width: 1.5, dash: [5, 4], points: { show: false } },
    ],
  };
}

function Line() {
  const box = useRef(null);
  useEffect(() => {
    let plot = null;
    const draw = () => {
      plot?.destroy();
      plot = new uPlot(options(box.current.clientWidth), history.columns, box.current);
      box.current.plot = plot;
    };
    draw();
    const timer = setInterval(() => plot.setData(history.columns), TICK_MS);
    const resized = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    resized.observe(box.current);
    dark.addEventListener("change", draw);
    return () => {
      clearInterval(timer);
      resized.disconnect();
      dark.removeEventListener("change", draw);
      plot.destroy();
    };
  }, []);
  return html`<div class="line" ref=${box} role="img" aria-label="Memory over the last minute"></div>`;
}

export function Memory({ memory }) {
  if (latest === null) history.add(Date.now() / 1000, memory);
  latest = memory;
  const known = OWNERS.reduce((sum, [owner]) => sum + owned(memory, owner), 0);
  const share = Math.round((100 * memory.footprint) / memory.budget);
  return html`
    <section class="panel" aria-labelledby="memory-title">
      <h2 id="memory-title">Memory</h2>
      <p class="headline">
        <strong>${size(memory.footprint)}</strong> used by the process
        <span class="of">${Number.isFinite(share) ? `, ${share} % of the budget of ${size(memory.budget)}` : ""}</span>
      </p>
      <${Line} />
      <dl class="legend">
        ${OWNERS.map(
          ([owner, label, colour]) => html`
            <div key=${owner}><dt><i class="swatch" data-colour=${colour.slice(2)}></i>${label}</dt><dd>${size(owned(memory, owner))}</dd></div>`,
        )}
        <div title="Workspace of a step, buffers that MLX keeps, Python and its libraries"><dt><i class="swatch" data-colour="rest"></i>Rest of the process</dt><dd data-owner="rest">${size(Math.max(0, memory.footprint - known))}</dd></div>
        <div><dt><i class="rule"></i>Process</dt><dd>${size(memory.footprint)}</dd></div>
        <div><dt><i class="rule dashed"></i>Budget</dt><dd>${size(memory.budget)}</dd></div>
      </dl>
    </section>`;
}
