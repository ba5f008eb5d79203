// Requests, tiers and models: tables of what the feed has.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { Share, count, many, seconds, size } from "./format.js";
import { call, complaint } from "./link.js";

// Requests that have ended are shown a little longer, or most would hardly be seen.
const ENDED_SHOWN = 5;

function newestFirst(models) {
  const named = (which) => models.flatMap((model) => model[which].map((request) => ({ ...request, model: model.name })));
  const sorted = (rows) => rows.sort((one, other) => other.id - one.id);
  return sorted([...named("requests"), ...sorted(named("ended")).slice(0, ENDED_SHOWN)]);
}

function Request({ request, several }) {
  const { prompt_tokens: prompt, cached_tokens: cached } = request;
  // Of one that has ended, only what it was in the end is known.
  const computed = Math.max(0, (request.stored_tokens ?? (request.generated_tokens ? prompt : cached)) - cached);
  const label = `${many(cached, "token")} cached, ${count(computed)} computed of ${count(prompt)}`;
  const progress = cached + computed < prompt ? `${count(cached)} cached, ${count(computed)} computed of ${count(prompt)}` : `${count(cached)} cached of ${count(prompt)}`;
  const guesses = request.proposed_tokens ? `${count(request.accepted_tokens)} of ${count(request.proposed_tokens)}` : "–";
  return html`
    <tr data-state=${request.state}>
      <td class="number">${request.id}</td>
      <td><span class="state">${request.state}</span></td>
      ${several && html`<td>${request.model}</td>`}
      <td class="wide" title=${label}>
        <${Share} parts=${[["cached", cached], ["held", computed]]} total=${prompt} label=${label} />
        <small>${progress}</small>
      </td>
      <td class="number">${count(request.generated_tokens)}<small> / ${count(request.max_tokens)}</small></td>
      <td class="number">${request.tokens_per_second === null ? "–" : request.tokens_per_second.toFixed(1)}</td>
      <td class="number">${guesses}</td>
      <td class="number">${seconds(request.age_s)}</td>
    </tr>`;
}

export function Requests({ models }) {
  const rows = newestFirst(models);
  const several = models.length > 1;
  const running = rows.filter((row) => row.state !== "ended").length;
  return html`
    <section class="panel" aria-labelledby="requests-title">
      <h2 id="requests-title">Requests <small>${running ? `${running} active` : "none active"}</small></h2>
      ${rows.length === 0
        ? html`<p class="empty">There have been no requests yet.</p>`
        : html`
          <div class="scroll" tabindex="0" role="group" aria-label="Table of requests"><table class="requests">
            <thead><tr>
              <th class="number" scope="col">#</th><th scope="col">State</th>${several && html`<th scope="col">Model</th>`}
              <th scope="col">Prompt</th><th class="number" scope="col">Generated</th><th class="number" scope="col">Tokens/s</th>
              <th class="number" scope="col"><abbr title="Proposed tokens that the model accepted">Accepted</abbr></th><th class="number" scope="col">Age</th>
            </tr></thead>
            <tbody>${rows.map((row) => html`<${Request} key=${row.id} request=${row} several=${several} />`)}</tbody>
          </table></div>`}
    </section>`;
}

// Bytes read and written per second, averaged over a few seconds.
const RATE_MS = 3000;
const samples = new Map();

function rates(tier) {
  const now = performance.now();
  const name = `${tier.model} ${tier.name}`;
  const kept = [...(samples.get(name) ?? []), { now, read: tier.promoted_bytes, written: tier.written_bytes }];
  // One that is older than the span stays, to compare with.
  while (kept.length > 2 && kept[1].now < now - RATE_MS) kept.shift();
  samples.set(name, kept);
  const past = (now - kept[0].now) / 1000;
  const rate = (which) => (past > 0 ? Math.max(0, kept.at(-1)[which] - kept[0][which]) / past : 0);
  return { read: rate("read"), written: rate("written") };
}

function Rates({ tier }) {
  const { read, written } = rates(tier);
  return html`<p class="rates"><span>Reading <b>${size(read)}/s</b></span><span>Writing <b>${size(written)}/s</b></span></p>`;
}

export function Tiers({ models }) {
  const [, tick] = useState(0);
  // Rates fall to nothing while the feed is silent.
  useEffect(() => {
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  const tiers = models.flatMap((model) => model.tiers.map((tier) => ({ ...tier, model: model.name })));
  if (!tiers.length) return null;
  return html`
    <section class="panel" aria-labelledby="tiers-title">
      <h2 id="tiers-title">Tiers</h2>
      ${tiers.map(
        (tier) => html`
          <div class="tier" key=${tier.model + tier.name}>
            <p><b>${tier.name}</b>${models.length > 1 ? ` of ${tier.model}` : ""} <span class="of">${tier.limit ? `${size(tier.bytes)} of ${size(tier.limit)}` : ""}</span></p>
            ${tier.limit ? html`<${Share} parts=${[["cached", tier.bytes]]} total=${tier.limit} />` : null}
            <${Rates} tier=${tier} />
            <p class="note">${tier.limit ? `${many(tier.blocks, "block")}; ` : ""}${size(tier.promoted_bytes)} read, ${size(tier.written_bytes)} written${tier.queued_bytes ? `, ${size(tier.queued_bytes)} queued` : ""}${tier.discarded ? `; ${count(tier.discarded)} discarded` : ""}${tier.corrupt ? `; ${count(tier.corrupt)} damaged` : ""}</p>
            ${tier.failed && html`<p class="bad">${tier.failed}</p>`}
          </div>`,
      )}
    </section>`;
}

function Model({ model, told }) {
  const [busy, setBusy] = useState(false);
  const act = async (what) => {
    setBusy(true);
    try {
      const response = await call(`admin/models/${encodeURIComponent(model.name)}/${what}`, { method: "POST" });
      told(response.ok ? "" : await complaint(response));
    } catch {
      told("The server cannot be reached.");
    } finally {
      setBusy(false);
    }
  };
  const loaded = model.state === "loaded";
  const pinned = model.keep === "pinned";
  const button = (what, label) =>
    html`<button type="button" aria-disabled=${busy} onClick=${() => busy || act(what)} aria-label=${`${label} ${model.name}`}>${label}</button>`;
  return html`
    <tr data-state=${model.state}>
      <td>${model.name}</td>
      <td><span class="state">${model.state}</span>${model.reason && html` <small class="bad">${model.reason}</small>`}</td>
      <td class="number">${size(model.bytes.total)}</td>
      <td>${model.keep}</td>
      <td class="actions">${loaded ? button("unload", "Unload") : button("load", "Load")}${pinned ? button("unpin", "Unpin") : button("pin", "Pin")}</td>
    </tr>`;
}

export function Models({ models, queue }) {
  const [message, setMessage] = useState("");
  if (models.length < 2) return null;
  return html`
    <section class="panel" aria-labelledby="models-title">
      <h2 id="models-title">Models <small>${queue.length ? `${many(queue.length, "request")} waiting for one` : ""}</small></h2>
      <div class="scroll" tabindex="0" role="group" aria-label="Table of models"><table>
        <thead><tr><th scope="col">Name</th><th scope="col">State</th><th class="number" scope="col">Memory</th><th scope="col">Keep</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
        <tbody>${models.map((model) => html`<${Model} key=${model.name} model=${model} told=${setMessage} />`)}</tbody>
      </table></div>
      <p class="bad" role="status">${message}</p>
    </section>`;
}
