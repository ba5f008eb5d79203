// The server: requests with the key, and the feed.
//
// The key is asked for when a request is answered with 401, once for all that wait for it, and kept for the session.

const STORED = "onekv-key";
const SILENT_MS = 15000;
const RETRY_MS = [500, 1000, 2000];

let asking = null;
// Set by the dialog: shows it and gives a promise of what was entered.
let prompt = async () => null;

export function onKeyWanted(show) {
  prompt = show;
}

export function key() {
  return sessionStorage.getItem(STORED);
}

export function setKey(value) {
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

function askForKey(refused) {
  asking ??= prompt(refused)
    .then((value) => setKey(value))
    .finally(() => {
      asking = null;
    });
  return asking;
}

// As fetch, with the key; asks for another one as long as that is refused.
export async function call(path, options = {}) {
  for (;;) {
    const used = key();
    const headers = new Headers(options.headers);
    if (used) headers.set("Authorization", `Bearer ${used}`);
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    await response.body?.cancel();
    // Somebody else may have asked meanwhile.
    if (key() === used) await askForKey(used !== null);
    if (options.signal?.aborted) throw new DOMException("stopped", "AbortError");
  }
}

export async function complaint(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? text;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

// The data of server-sent events, one after the other; `heard` is called for every piece that comes.
export async function* events(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// A tab in the background stops watching after a while: nobody looks, and the server then does nothing for it.
const HIDDEN_MS = 60000;

function whenHidden(abort) {
  let timer = null;
  const changed = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(abort, HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", changed);
  changed();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", changed);
  };
}

function visible() {
  if (!document.hidden) return null;
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Follow the feed for ever. `told` gets { state, snapshot?, message? }, state one of live, lost, loading, forbidden.
export async function follow(told) {
  let failures = 0;
  for (;;) {
    const control = new AbortController();
    const shown = whenHidden(() => control.abort());
    let timer = setTimeout(() => control.abort(), 10 * SILENT_MS);
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENT_MS);
    };
    try {
      const response = await call("admin/live", { signal: control.signal, cache: "no-store" });
      if (response.status === 403) {
        told({ state: "forbidden", message: await complaint(response) });
        const refused = key();
        while (key() === refused) await pause(1000);
      } else if (!response.ok) {
        const message = await complaint(response);
        told({ state: response.status === 503 ? "loading" : "lost", message });
      } else {
        for await (const data of events(response, heard)) {
          failures = 0;
          told({ state: "live", snapshot: JSON.parse(data) });
        }
        told({ state: "lost", message: "the server ended the feed" });
      }
    } catch (error) {
      // Anything but a lost connection is a bug, to be seen.
      if (!(error instanceof TypeError || error.name === "AbortError")) throw error;
      told({ state: "lost", message: "the server cannot be reached" });
    } finally {
      clearTimeout(timer);
      shown();
    }
    await visible();
    await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
    failures += 1;
  }
}
