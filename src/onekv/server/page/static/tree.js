// Cached conversations as a tree: a prefix that several share is one row, with their continuations below it.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { useFetched } from "./fetched.js";
import { Owner, Share, ago, count, many, refocus, size } from "./format.js";
import { call, complaint } from "./link.js";

const SHOWN = 10;

// Rows in the order of a tree, the largest branch first, each with its depth.
function arrange(rows) {
  const below = new Map();
  for (const row of rows) below.set(row.parent, [...(below.get(row.parent) ?? []), row]);
  const arranged = [];
  const visit = (row, depth) => {
    arranged.push({ ...row, depth });
    for (const child of below.get(row.id) ?? []) visit(child, depth + 1);
  };
  for (const row of below.get(null) ?? []) visit(row, 0);
  return arranged;
}

function Row({ row, keys, largest, since, act, busy, pins }) {
  const text = row.text || (row.text === null ? "The text belongs to another key." : "(no text)");
  const name = row.text || `tokens ${row.start} to ${row.end}`;
  const button = (label, what, node) =>
    html`<button type="button" aria-disabled=${busy} aria-label=${`${label} ${name}`} onClick=${() => busy || act(what, node)}>${label}</button>`;
  return html`
    <tr data-row=${row.id} data-depth=${row.depth} data-pinned=${row.pinned}>
      <td class="branch">
        <div style=${{ paddingLeft: `${Math.min(row.depth, 8) * 16}px` }}>
          <span class=${row.text ? "words" : "note"} dir="auto">${row.depth > 0 && html`<i aria-hidden="true">└ </i>`}${text}</span>
          <${Share} parts=${[[row.pinned ? "pinned" : "cached", row.bytes]]} total=${largest} />
        </div>
      </td>
      <td class="number">${count(row.start)}–${count(row.end)}</td>
      <td class="number">${size(row.bytes)}${row.conversations > 1 && html`<small> of ${size(row.total_bytes)} in ${many(row.conversations, "conversation")}</small>`}</td>
      ${keys && html`<td><${Owner} of=${row} /></td>`}
      <td>${row.running ? many(row.running, "request") : ago(row.idle_s + since)}</td>
      <td class="actions">
        ${pins && (row.pinned ? button("Unpin", "unpin", row.id) : button("Pin", "pin", row.id))}
        ${button("Drop", "drop", row.first)}
      </td>
    </tr>`;
}

// `names` are the loaded models; `pins` whether this key may pin.
export function Conversations({ names, version, pins }) {
  const [chosen, setChosen] = useState(null);
  const [changes, setChanges] = useState(0);
  const [busy, setBusy] = useState(false);
  const [message, setMessage] = useState("");
  const [all, setAll] = useState(false);
  const model = names.includes(chosen) ? chosen : names[0];
  const query = model === undefined ? "" : `?model=${encodeURIComponent(model)}`;
  const answer = useFetched(`admin/cache/conversations${query}`, version, changes);
  const panel = useRef(null);
  const acted = useRef(false);
  useEffect(() => {
    // The button may be gone with its row.
    if (acted.current) refocus(() => panel.current);
    acted.current = false;
  }, [answer]);
  const rows = answer?.rows ? arrange(answer.rows) : [];
  const keys = rows.some(({ own }) => !own);
  const largest = Math.max(1, ...rows.map((row) => row.bytes));
  const since = answer ? (performance.now() - answer.at) / 1000 : 0;
  const act = async (what, node) => {
    setBusy(true);
    try {
      const body = JSON.stringify({ node, ...(model === undefined ? {} : { model }) });
      const response = await call(`admin/cache/${what}`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
      setMessage(response.ok ? "" : await complaint(response));
    } catch {
      setMessage("The server cannot be reached.");
    } finally {
      setBusy(false);
      acted.current = true;
      setChanges((n) => n + 1);
    }
  };
  const told = answer?.error ?? message;
  return html`
    <section class="panel" aria-labelledby="tree-title" ref=${panel} tabindex="-1">
      <h2 id="tree-title">Cached conversations
        <small>${answer?.rows ? `${many(answer.conversations, "conversation")} in ${size(answer.bytes)}` : ""}</small></h2>
      ${names.length > 1 && html`<label class="choose">Model <select value=${model} onChange=${(event) => setChosen(event.target.value)}>${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}
      ${rows.length === 0
        ? html`<p class="empty">${answer ? "Nothing is cached in memory." : "…"}</p>`
        : html`
          <div class="scroll" tabindex="0" role="group" aria-label="Tree of cached conversations"><table class="tree">
            <thead><tr><th scope="col">Text</th><th class="number" scope="col">Tokens</th><th class="number" scope="col">Size</th>${keys && html`<th scope="col">Key</th>`}<th scope="col">Last used</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
            <tbody>${rows.slice(0, all ? undefined : SHOWN).map((row) => html`<${Row} key=${row.id} row=${row} keys=${keys} largest=${largest} since=${since} act=${act} busy=${busy} pins=${pins} />`)}</tbody>
          </table></div>`}
      ${rows.length > SHOWN && html`<button type="button" class="quiet" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${count(rows.length)}`}</button>`}
      ${answer?.left_out?.rows > 0 && html`<p class="note">${many(answer.left_out.rows, "smaller row")} with ${size(answer.left_out.bytes)} are not listed.</p>`}
      <p class="bad" role="status">${told}</p>
    </section>`;
}
