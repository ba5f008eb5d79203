// Starts everything: the feed goes to the board, the chat stands beside it.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Chat } from "./chat.js";
import { follow, key, onKeyWanted, setKey } from "./link.js";
import { Pool } from "./map.js";
import { Memory } from "./memory.js";
import { Models, Requests, Tiers } from "./panels.js";
import { Prefix } from "./prefix.js";
import { Talk } from "./talk.js";
import { Conversations } from "./tree.js";

const STATES = {
  connecting: "Connecting",
  live: "Live",
  lost: "Reconnecting",
  loading: "Loading the model",
  forbidden: "Chat only",
};

const loaded = (snapshot) => snapshot.models.filter((model) => model.state === "loaded").map((model) => model.name);

function Top({ told }) {
  const { state, snapshot } = told;
  const names = snapshot ? loaded(snapshot) : [];
  return html`
    <h1><img src="page/icon.svg" alt="" width="20" height="20" />OneKV</h1>
    <p class="names">${names.join(", ")}</p>
    <p class="link" data-state=${state} role="status"><i></i>${STATES[state]}</p>
    <a class="jump" href="#chat">Chat</a>
    ${key() && html`<button type="button" class="quiet" onClick=${() => { setKey(null); location.reload(); }}>Forget key</button>`}`;
}

function titles(snapshot) {
  const several = snapshot.models.length > 1;
  return snapshot.models.flatMap((model, number) =>
    model.pools.map((pool, group) => {
      const title = `KV pool${several ? ` of ${model.name}` : ""}, ${pool.group}`;
      return { id: `pool-${number}-${group}`, title, model: model.name, group, pool };
    }),
  );
}

// Changes whenever something was cached, evicted, pinned or used.
function versionOf({ lookups, models }) {
  const figures = models.flatMap(({ prefix, pools }) => [prefix?.nodes, prefix?.evicted_blocks, ...pools.flatMap((pool) => [pool.pinned, pool.held])]);
  return [lookups, ...figures].join();
}

// For a key that is not the administrator's: what it has cached itself.
function Own({ version }) {
  return html`
    <section class="panel"><h2>Memory</h2><p class="empty">With this key you can chat and see what it has cached. Memory as a whole is shown only to the server's first key.</p></section>
    <${Prefix} models=${null} version=${version} />
    <${Conversations} names=${[]} version=${version} pins=${false} />`;
}

function Board({ told }) {
  const { snapshot, state, message, tick, epoch } = told;
  if (state === "forbidden") return html`<${Own} version=${tick} />`;
  if (!snapshot) return html`<section class="panel"><h2>Memory</h2><p class="empty">${message ?? "Waiting for the server."}</p></section>`;
  return html`
    <${Memory} memory=${snapshot.memory} />
    ${titles(snapshot).map((each) => html`<${Pool} key=${each.id} ...${each} />`)}
    <${Requests} models=${snapshot.models} />
    <${Prefix} key=${epoch} models=${snapshot.models} version=${snapshot.lookups} />
    <${Conversations} names=${loaded(snapshot)} version=${`${epoch} ${versionOf(snapshot)}`} pins=${true} />
    <${Tiers} models=${snapshot.models} />
    <${Models} models=${snapshot.models} queue=${snapshot.queue} />`;
}

function KeyDialog() {
  const dialog = useRef(null);
  const [asked, setAsked] = useState(null);
  const [text, setText] = useState("");
  useEffect(() => {
    onKeyWanted((refused) => new Promise((resolve) => setAsked({ refused, resolve })));
  }, []);
  // Pressed twice, Escape closes it whatever the page says; without a key there is nothing behind it.
  const pending = useRef(false);
  useEffect(() => {
    pending.current = asked !== null;
    if (asked && !dialog.current.open) dialog.current.showModal();
  }, [asked]);
  const submit = (event) => {
    event.preventDefault();
    if (!text.trim()) return;
    pending.current = false;
    dialog.current.close();
    asked.resolve(text.trim());
    setAsked(null);
    setText("");
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()} onClose=${() => pending.current && dialog.current.showModal()}>
      <form onSubmit=${submit}>
        <h2 id="key-title">API key</h2>
        <p class=${asked?.refused ? "bad" : "note"}>${asked?.refused ? "The server rejected this key." : "This server requires a key. It is kept until you close this tab."}</p>
        <label for="key">Key</label>
        <input id="key" type="password" autocomplete="off" spellcheck=${false} value=${text} onInput=${(event) => setText(event.target.value)} />
        <div class="row"><button type="submit" class="main">Use this key</button></div>
      </form>
    </dialog>`;
}

const talk = new Talk();
const at = (id) => document.getElementById(id);
// `epoch` counts connections: behind a new one may be another server. `tick` is the clock of a key without a feed.
let last = { state: "connecting", epoch: 0, tick: 0 };
const TICK_MS = 5000;

function show(told) {
  const epoch = last.epoch + (told.state === "live" && last.state !== "live" ? 1 : 0);
  // What was known stays there while the connection is lost.
  last = { ...last, message: undefined, ...told, epoch };
  const ready = last.state === "live" || last.state === "forbidden";
  render(html`<${Top} told=${last} />`, at("top"));
  render(html`<${Board} told=${last} />`, at("board"));
  at("board").toggleAttribute("data-stale", last.state === "lost");
  render(html`<${Chat} talk=${talk} ready=${ready} models=${last.snapshot?.models ?? []} />`, at("chat"));
}

setInterval(() => last.state === "forbidden" && !document.hidden && show({ tick: last.tick + 1 }), TICK_MS);

render(html`<${KeyDialog} />`, at("dialogs"));
show(last);
// The dialog has to be there before somebody needs it.
setTimeout(() => follow(show), 0);
