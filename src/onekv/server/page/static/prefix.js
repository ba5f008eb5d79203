// The prefix cache: what was reused and what was not, over time, by reason, and the words at which prompts diverged.

import { html, useState } from "./vendor/htm-preact.js";
import { useLookups } from "./fetched.js";
import { Owner, Share, ago, count, many, seconds } from "./format.js";

const SPAN_S = 600;
const BUCKETS = 60;
const SHOWN = 6;
// Reasons as the server names them, and how they are drawn; others are drawn as the last one.
const KINDS = [
  ["reused", "Reused", "cached"],
  ["never seen", "Never seen", "missed"],
  ["evicted", "Evicted", "evicted"],
  ["no snapshot at that length", "No snapshot", "states"],
  ["other", "Other", "weights"],
];
const kindOf = (reason) => (KINDS.some(([name]) => name === reason) ? reason : "other");

// Tokens by kind in each of the last buckets, the newest one last.
function buckets(lookups, now) {
  const columns = Array.from({ length: BUCKETS }, () => ({}));
  const width = SPAN_S / BUCKETS;
  const end = Math.ceil(now / width) * width;
  for (const { time, prompt_tokens: prompt, cached_tokens: cached, reason } of lookups) {
    const column = columns[BUCKETS - 1 - Math.floor((end - time) / width)];
    if (!column) continue;
    column.reused = (column.reused ?? 0) + cached;
    // The last token of a prompt is always computed, also where all of it is cached.
    if (reason) column[kindOf(reason)] = (column[kindOf(reason)] ?? 0) + prompt - cached;
  }
  return columns;
}

function Chart({ lookups }) {
  const columns = buckets(lookups, Date.now() / 1000);
  const totals = columns.map((column) => Object.values(column).reduce((sum, tokens) => sum + tokens, 0));
  const most = Math.max(1, ...totals);
  const used = KINDS.filter(([name]) => name === "reused" || columns.some((column) => column[name]));
  const sums = used.map(([name]) => columns.reduce((sum, column) => sum + (column[name] ?? 0), 0));
  const label = used.map(([, title], i) => `${title}: ${many(sums[i], "token")}`).join(", ");
  return html`
    <figure class="chart">
      <svg viewBox=${`0 0 ${BUCKETS} 100`} preserveAspectRatio="none" role="img" aria-label=${`Prompt tokens of the last ten minutes. ${label}`}>
        ${columns.map((column, at) => {
          let top = 100;
          return used.map(([name, , colour]) => {
            const height = (100 * (column[name] ?? 0)) / most;
            top -= height;
            return height > 0 && html`<rect key=${at + name} x=${at + 0.1} y=${top} width="0.8" height=${height} data-fill=${colour} />`;
          });
        })}
      </svg>
      <figcaption class="axis"><span>10 min ago</span><span>${sums.some(Boolean) ? `at most ${many(most, "token")} in 10 s` : "no prompts"}</span><span>now</span></figcaption>
      <dl class="legend">
        ${used.map(([name, title, colour], i) => html`<div key=${name}><dt><i class="swatch" data-colour=${colour}></i>${title}</dt><dd>${count(sums[i])}</dd></div>`)}
      </dl>
    </figure>`;
}

function Words({ lookup }) {
  const { words, again } = lookup;
  if (!words) return html`<span class="note">The text belongs to another key.</span>`;
  const { before, had, came } = words;
  return html`
    <span class="words" dir="auto">
      ${before && html`<span class="note">…${before}</span>`}${had && html`<del>${had}</del>`}<ins>${came}</ins>
    </span>
    ${again > 0 && html`<small class="bad">${many(again, "token")} after this point ${again === 1 ? "is" : "are"} cached, but had to be recomputed</small>`}`;
}

function Misses({ lookups, several }) {
  const [all, setAll] = useState(false);
  const misses = lookups.filter((each) => each.reason).reverse();
  if (!misses.length) return null;
  const keys = misses.some(({ own }) => !own);
  const now = Date.now() / 1000;
  return html`
    <h3>Where prompts diverged from the cache</h3>
    <div class="scroll" tabindex="0" role="group" aria-label="Table of misses"><table class="misses">
      <thead><tr><th scope="col">When</th>${several && html`<th scope="col">Model</th>`}<th class="number" scope="col">Cached</th><th scope="col">Reason</th>${keys && html`<th scope="col">Key</th>`}<th scope="col">Words</th></tr></thead>
      <tbody>
        ${misses.slice(0, all ? undefined : SHOWN).map(
          (lookup) => html`
            <tr key=${lookup.number} data-lookup=${lookup.number}>
              <td>${ago(now - lookup.time)}</td>
              ${several && html`<td>${lookup.model}</td>`}
              <td class="number">${count(lookup.cached_tokens)}<small> / ${count(lookup.prompt_tokens)}</small></td>
              <td>${lookup.reason}</td>
              ${keys && html`<td><${Owner} of=${lookup} /></td>`}
              <td class="said"><${Words} lookup=${lookup} /></td>
            </tr>`,
        )}
      </tbody>
    </table></div>
    ${misses.length > SHOWN && html`<button type="button" class="quiet" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${count(misses.length)}`}</button>`}`;
}

function Counts({ models }) {
  const all = models.map((model) => model.prefix).filter(Boolean);
  const sum = (name) => all.reduce((total, prefix) => total + prefix[name], 0);
  const misses = new Map();
  for (const { misses: found } of all)
    for (const [reason, times] of Object.entries(found)) misses.set(reason, (misses.get(reason) ?? 0) + times);
  const sorted = [...misses].sort((one, other) => other[1] - one[1]);
  const rows = [["hit", sum("hits"), "cached"], ...sorted.map(([reason, times]) => [reason, times, KINDS.find(([name]) => name === kindOf(reason))[2]])];
  const most = Math.max(1, ...rows.map((row) => row[1]));
  return html`
    <h3>Requests since the start</h3>
    <ul class="bars">
      ${rows.map(
        ([reason, times, colour]) => html`
          <li key=${reason}><span>${reason === "hit" ? "Hit" : `Miss: ${reason}`}</span>
          <${Share} parts=${[[colour, times]]} total=${most} /><b>${count(times)}</b></li>`,
      )}
    </ul>
    <p class="note">${many(sum("nodes"), "cached block")}${sum("snapshots") ? `, ${many(sum("snapshots"), "snapshot")}` : ""}, ${count(sum("evicted_blocks"))} evicted.
      A request whose prompt is only partly cached counts as both.</p>`;
}

// `models` are those of the feed; null for a key that has none.
export function Prefix({ models, version }) {
  const lookups = useLookups(version);
  if (models && !models.some((model) => model.prefix)) return null;
  const reused = models?.reduce((sum, model) => sum + (model.prefix?.tokens_reused ?? 0), 0);
  return html`
    <section class="panel" aria-labelledby="prefix-title">
      <h2 id="prefix-title">Prefix cache <small>${models ? `${many(reused, "token")} reused` : "requests of this key"}</small></h2>
      <${Chart} lookups=${lookups} />
      ${models && html`<${Counts} models=${models} />`}
      <${Misses} lookups=${lookups} several=${models?.length > 1} />
    </section>`;
}
