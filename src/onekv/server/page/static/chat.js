// The chat: what is said, what is being said, and what can be done about it.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { count, many, refocus, seconds, size } from "./format.js";
import { call } from "./link.js";
import { generate } from "./talk.js";

// Bytes that a token takes in layers which keep all of them; null where that is not known.
function tokenBytes(models, name) {
  const model = models.find((each) => each.names.includes(name)) ?? (name === "default" ? models[0] : undefined);
  const pools = model?.pools.filter((pool) => pool.group === "full attention") ?? [];
  return pools.length ? pools.reduce((sum, pool) => sum + pool.block_bytes, 0) / model.block_size : null;
}

function Figures({ usage, bytes }) {
  const { cached, computed, generated, firstToken, speed } = usage;
  const total = cached + computed;
  const width = (value) => ({ width: `${(100 * value) / Math.max(1, total)}%` });
  return html`
    <div class="figures">
      <div class="bar" role="img" aria-label=${`${many(cached, "token")} of the prompt cached, ${count(computed)} computed`}>
        <i data-colour="cached" style=${width(cached)}></i><i data-colour="held" style=${width(computed)}></i>
      </div>
      <span><b data-figure="cached">${count(cached)}</b> cached</span>
      <span><b data-figure="computed">${count(computed)}</b> computed</span>
      ${generated !== null && html`<span><b>${count(generated)}</b> generated</span>`}
      ${firstToken !== null && html`<span>first token ${seconds(firstToken)}${speed ? `, ${speed.toFixed(0)} tokens/s` : ""}</span>`}
      ${cached > 0 && bytes !== null && html`<span data-figure="saved">${size(cached * bytes)} of KV shared instead of being computed and stored again</span>`}
    </div>`;
}

function Siblings({ message, changed, busy }) {
  const { children, chosen } = message.parent;
  if (children.length < 2) return null;
  const can = { [-1]: !busy && chosen > 0, 1: !busy && chosen < children.length - 1 };
  const button = (by, name, sign) =>
    html`<button type="button" class="quiet" id=${`branch-${message.parent.id}${by}`} aria-label=${name} aria-disabled=${!can[by]} onClick=${() => move(by)}>${sign}</button>`;
  const move = (by) => {
    if (!can[by]) return;
    message.parent.chosen = chosen + by;
    changed();
    // The same button, of the message that is shown instead.
    refocus(() => document.getElementById(`branch-${message.parent.id}${by}`));
  };
  return html`
    <span class="siblings">
      ${button(-1, "Previous branch", "‹")}
      <span>${chosen + 1} of ${children.length}</span>
      ${button(1, "Next branch", "›")}
    </span>`;
}

function Editor({ message, done }) {
  const [text, setText] = useState(message.content);
  const box = useRef(null);
  useEffect(() => box.current.focus(), []);
  const keys = (event) => {
    if (event.key === "Escape") done(null);
  };
  return html`
    <form class="editor" onSubmit=${(event) => { event.preventDefault(); if (text.trim()) done(text); }}>
      <label class="hidden" for=${`edit-${message.id}`}>Your message, edited</label>
      <textarea id=${`edit-${message.id}`} ref=${box} rows="3" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${keys}></textarea>
      <div class="row"><button type="submit" class="main">Send as a branch</button><button type="button" onClick=${() => done(null)}>Cancel</button></div>
    </form>`;
}

// Text that may have to be scrolled, and so has to be reachable by keyboard.
const LONG = 400;

function stateOf(message) {
  const { state, error, progress, finish } = message;
  if (state === "failed") return `Failed: ${error}`;
  if (state === "stopped") return "Stopped";
  if (state === "waiting") return progress ? `Prefill: ${count(progress.processed)} of ${many(progress.total, "token")}, ${count(progress.cache)} cached` : "Waiting for the first token";
  return finish === "length" ? "Cut off at the maximum number of tokens" : null;
}

function Message({ message, busy, changed, edit, again, bytes }) {
  const [editing, setEditing] = useState(false);
  const button = useRef(null);
  const done = (text) => {
    setEditing(false);
    if (text === null) refocus(() => button.current);
    else edit(message, text);
  };
  const said = stateOf(message);
  return html`
    <article class="message" data-role=${message.role} data-state=${message.state}>
      <h3>${message.role === "user" ? "You" : "Model"}</h3>
      ${message.thought && html`<details class="thought"><summary>Thinking</summary><div class="text" dir="auto">${message.thought}</div></details>`}
      ${editing ? html`<${Editor} message=${message} done=${done} />` : html`<div class="text" dir="auto" tabindex=${message.content.length > LONG ? 0 : undefined}>${message.content}</div>`}
      ${said && html`<p class=${message.state === "failed" ? "bad" : "note"}>${said}</p>`}
      ${message.usage && html`<${Figures} usage=${message.usage} bytes=${bytes} />`}
      ${!editing && html`
        <div class="row tools">
          <${Siblings} message=${message} changed=${changed} busy=${busy} />
          ${message.role === "user"
            ? html`<button type="button" class="quiet" ref=${button} aria-disabled=${busy} onClick=${() => busy || setEditing(true)}>Edit</button>`
            : html`<button type="button" class="quiet" aria-disabled=${busy} onClick=${() => busy || again(message)}>Regenerate</button>`}
        </div>`}
    </article>`;
}

function Settings({ settings, set, models }) {
  const number = (name) => (event) => Number.isFinite(event.target.valueAsNumber) && set({ [name]: event.target.valueAsNumber });
  return html`
    <details class="settings">
      <summary>Settings</summary>
      <div class="fields">
        <label>Model<select value=${settings.model} onChange=${(event) => set({ model: event.target.value })}>
          ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
        <label>Max tokens<input type="number" min="1" step="1" value=${settings.maxTokens} onInput=${number("maxTokens")} /></label>
        <label>Temperature<input type="number" min="0" max="2" step="0.1" value=${settings.temperature} onInput=${number("temperature")} /></label>
        <label class="all">System message<textarea rows="2" value=${settings.system} onInput=${(event) => set({ system: event.target.value })}></textarea></label>
      </div>
    </details>`;
}

async function names() {
  const response = await call("v1/models");
  return response.ok ? (await response.json()).data.map((model) => model.id) : [];
}

// `shown` are the models of the feed, as far as this key sees them.
export function Chat({ talk, ready, models: shown }) {
  const [, changed] = useReducer((n) => n + 1, 0);
  const [draft, setDraft] = useState("");
  const [running, setRunning] = useState(null);
  const [models, setModels] = useState(["default"]);
  const [settings, setSettings] = useState({ model: "default", maxTokens: 512, temperature: 0.7, system: "" });
  const log = useRef(null);
  const busy = running !== null;
  useEffect(() => {
    if (!ready) return;
    names().then((found) => found.length && (setModels(found), setSettings((old) => found.includes(old.model) ? old : { ...old, model: found[0] }))).catch(() => {});
  }, [ready]);
  useEffect(() => {
    // Follow what is said, unless somebody reads further up.
    const { scrollHeight, scrollTop, clientHeight } = log.current;
    if (scrollHeight - scrollTop - clientHeight < 160) log.current.scrollTop = scrollHeight;
  });

  const answer = async (question) => {
    const message = talk.add(question, "assistant", "");
    const control = new AbortController();
    setRunning(control);
    log.current.scrollTop = log.current.scrollHeight;
    // What was pressed may be gone: the editor, or the answer that is replaced. The log opens no keyboard on a phone.
    refocus(() => log.current);
    await generate(message, settings, control.signal, changed);
    setRunning(null);
  };
  const clear = () => {
    talk.root.children = [];
    changed();
    refocus(() => log.current);
  };
  const send = (parent, text) => answer(talk.add(parent, "user", text));
  const submit = (event) => {
    event.preventDefault();
    if (busy || !draft.trim()) return;
    send(talk.last, draft);
    setDraft("");
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const path = talk.path();
  return html`
    <div class="head"><h2>Chat</h2>
      ${path.length > 0 && html`<button type="button" class="quiet" aria-disabled=${busy} onClick=${() => busy || clear()}>Clear</button>`}</div>
    <div class="log" ref=${log} role="log" aria-live="polite" aria-busy=${busy} aria-label="Conversation" tabindex="0">
      ${path.length === 0 && html`<p class="empty">Ask something, then edit your question or regenerate the answer: branches share the blocks of their common prefix, as the map shows.</p>`}
      ${path.map((message) => html`
        <${Message} key=${message.id} message=${message} busy=${busy} changed=${changed} bytes=${tokenBytes(shown, settings.model)}
          edit=${(old, text) => send(old.parent, text)} again=${(old) => answer(old.parent)} />`)}
    </div>
    <form class="compose" onSubmit=${submit}>
      <${Settings} settings=${settings} set=${(some) => setSettings((old) => ({ ...old, ...some }))} models=${models} />
      <label class="hidden" for="draft">Your message</label>
      <textarea id="draft" rows="3" placeholder="Message" value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${keys}></textarea>
      <div class="row">
        <span class="note">Enter sends, Shift+Enter starts a new line</span>
        ${busy
          ? html`<button type="button" class="main" onClick=${() => running.abort()}>Stop</button>`
          : html`<button type="submit" class="main" aria-disabled=${!draft.trim()}>Send</button>`}
      </div>
    </form>`;
}
