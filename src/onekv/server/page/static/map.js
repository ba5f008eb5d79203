// The pool map: a cell for every block, coloured by its state, and what is known about the one that is chosen.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { get } from "./fetched.js";
import { ago, count, dark, many, size, styled } from "./format.js";

const SHARED = 4;
const LOADING = 255;
const KINDS = [
  ["held", "In use"],
  ["shared", "Shared"],
  ["cached", "Cached"],
  ["pinned", "Pinned"],
  ["loading", "Being read from a tier"],
  ["free", "Free"],
];
// Long enough that moving the pointer across the map does not ask for every block on the way.
const REST_MS = 120;
const LARGEST = 16;
const TALLEST = 260;

// As docs/page.md has it: 0 free, 1 cached, 2 pinned, 3 held by one request, 4 by two, ..., 255 being read.
function kind(state) {
  if (state === LOADING) return "loading";
  return ["free", "cached", "pinned", "held"][state] ?? "shared";
}

function words(state) {
  if (state === LOADING) return "being read from a tier";
  if (state >= SHARED) return `shared by ${state - 2} requests`;
  return ["free", "cached, not in use", "pinned, not in use", "in use by one request"][state];
}

export function expand(map, blocks) {
  const states = new Uint8Array(blocks);
  if (map === null) return null;
  const pairs = atob(map);
  let at = 0;
  for (let i = 0; i < pairs.length; i += 2) {
    const end = at + pairs.charCodeAt(i + 1);
    states.fill(pairs.charCodeAt(i), at, end);
    at = end;
  }
  return states;
}

function tally(states) {
  const counts = Object.fromEntries(KINDS.map(([name]) => [name, 0]));
  for (const state of states) counts[kind(state)] += 1;
  return counts;
}

// The largest cells with which all blocks fit.
function fit(blocks, width) {
  for (let cell = LARGEST; cell > 2; cell -= 1) {
    const columns = Math.floor(width / cell);
    if (Math.ceil(blocks / columns) * cell <= TALLEST) return { cell, columns };
  }
  return { cell: 2, columns: Math.floor(width / 2) };
}

function paint(canvas, states, width, chosen) {
  const { cell, columns } = fit(states.length, width);
  const height = Math.ceil(states.length / columns) * cell;
  const ratio = devicePixelRatio || 1;
  canvas.width = columns * cell * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${columns * cell}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const gap = cell > 5 ? 2 : cell > 3 ? 1 : 0;
  const colours = Object.fromEntries(KINDS.map(([name]) => [name, styled(`--${name}`)]));
  states.forEach((state, i) => {
    const x = (i % columns) * cell;
    const y = Math.floor(i / columns) * cell;
    context.fillStyle = colours[kind(state)];
    context.fillRect(x, y, cell - gap, cell - gap);
    // The more requests share it, the fuller.
    if (state > SHARED && state < LOADING && cell > 5) {
      context.fillStyle = styled("--shared-more");
      const inner = Math.min(cell - gap - 2, (state - SHARED) * 2);
      context.fillRect(x + (cell - gap - inner) / 2, y + (cell - gap - inner) / 2, inner, inner);
    }
  });
  if (chosen !== null) {
    context.strokeStyle = styled("--text");
    context.lineWidth = 1.5;
    context.strokeRect((chosen % columns) * cell - 0.5, Math.floor(chosen / columns) * cell - 0.5, cell - gap + 1, cell - gap + 1);
  }
  return { cell, columns };
}

// Where it is, whose it is and how old: all but the text, which stands in a line of its own.
function facts(about) {
  const { start, end, key, own, requests, cached, idle_s: idle, pinned, tiers } = about;
  const known = requests.filter((id) => id !== null);
  return [
    `tokens ${count(start)} to ${count(end)}`,
    key !== null ? `key ${key}${own ? " (yours)" : ""}` : !own && "a former key",
    known.length > 0 && `request${known.length > 1 ? "s" : ""} ${known.join(", ")}`,
    cached ? `last used ${ago(idle)}` : "not cached yet",
    pinned && "pinned",
    cached && (tiers.length ? `in memory and on ${tiers.join(", ")}` : "in memory only"),
  ].filter(Boolean);
}

function useBlock(model, group, block, state) {
  const [about, setAbout] = useState(null);
  useEffect(() => {
    setAbout(null);
    if (block === null || !state) return undefined;
    const control = new AbortController();
    const ask = () =>
      get(`admin/cache/blocks/${group}/${block}?model=${encodeURIComponent(model)}`, { signal: control.signal }).then(setAbout, () => {});
    const timer = setTimeout(ask, REST_MS);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [model, group, block, state]);
  return about;
}

function Chosen({ model, group, block, state }) {
  const about = useBlock(model, group, block, state);
  if (block === null || state === undefined) return html`<output class="chosen note">Point at a block, tap it, or select one with the arrow keys.</output>`;
  return html`
    <output class="chosen" aria-live="polite">
      <b>Block ${count(block)}: ${words(state)}</b>
      ${about && !about.free && html`
        <span class="facts">${facts(about).join(" · ")}</span>
        ${about.text === null ? html`<span class="note">The text belongs to another key.</span>` : html`<q dir="auto">${about.text}</q>`}`}
    </output>`;
}

const KEYS = { ArrowRight: 1, ArrowLeft: -1 };

export function Pool({ id, pool, title, model, group }) {
  const canvas = useRef(null);
  const box = useRef(null);
  const grid = useRef({ cell: LARGEST, columns: 1 });
  const [width, setWidth] = useState(0);
  const [chosen, setChosen] = useState(null);
  const [scheme, setScheme] = useState(dark.matches);
  const states = useMemo(() => expand(pool.map, pool.blocks), [pool.map, pool.blocks]);
  useEffect(() => {
    const resized = new ResizeObserver(() => setWidth(box.current.clientWidth));
    const changed = () => setScheme(dark.matches);
    resized.observe(box.current);
    dark.addEventListener("change", changed);
    return () => {
      resized.disconnect();
      dark.removeEventListener("change", changed);
    };
  }, []);
  useEffect(() => {
    if (states && width) grid.current = paint(canvas.current, states, width, chosen);
  }, [states, width, chosen, scheme]);
  const counts = states ? tally(states) : null;

  const point = (event) => {
    const { cell, columns } = grid.current;
    const column = Math.floor(event.offsetX / cell);
    const at = Math.floor(event.offsetY / cell) * columns + column;
    setChosen(column < columns && at >= 0 && at < pool.blocks ? at : null);
  };
  const step = (event) => {
    const { columns } = grid.current;
    const by = KEYS[event.key] ?? { ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    setChosen(chosen === null ? 0 : Math.min(pool.blocks - 1, Math.max(0, chosen + by)));
  };
  return html`
    <section class="panel" aria-labelledby=${id}>
      <h2 id=${id}>${title} <small>${many(pool.blocks, "block")} of ${size(pool.block_bytes)}</small></h2>
      <div class="map" ref=${box}>
        <canvas ref=${canvas} tabindex="0" role="img" aria-label="Blocks of the pool; arrow keys select one"
          onPointerMove=${point} onPointerDown=${point} onPointerLeave=${(event) => event.pointerType === "mouse" && setChosen(null)}
          onKeyDown=${step} onBlur=${() => setChosen(null)}></canvas>
      </div>
      <dl class="legend">
        ${KINDS.map(
          ([name, label]) => html`
            <div key=${name}><dt><i class="swatch" data-colour=${name}></i>${label}</dt>
            <dd data-count=${name}>${counts ? count(counts[name]) : "–"}</dd></div>`,
        )}
      </dl>
      <${Chosen} model=${model} group=${group} block=${chosen} state=${chosen === null ? undefined : states?.[chosen]} />
    </section>`;
}
