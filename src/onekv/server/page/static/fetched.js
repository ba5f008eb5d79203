// What is fetched rather than in the feed, because it depends on the key: cache contents and lookups.

import { useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { call, complaint } from "./link.js";

const PAUSE_MS = 2000;
const KEPT = 512;

export async function get(path, options) {
  const response = await call(path, options);
  if (!response.ok) throw new Error(await complaint(response));
  return response.json();
}

// A lost connection is shown by the feed; when it is back, `version` changes and everything is fetched again.
function unlessLost(error) {
  if (error instanceof TypeError || error.name === "AbortError") return null;
  return { error: error.message };
}

// The answer of `path`, fetched again when `version` changes, at most every two seconds, and at once when `changes` does.
export function useFetched(path, version, changes) {
  const [answer, setAnswer] = useState(null);
  const last = useRef({ path: null, changes: null, at: -Infinity });
  useEffect(() => {
    const same = last.current.path === path && last.current.changes === changes;
    const pause = same ? last.current.at + PAUSE_MS - performance.now() : 0;
    const timer = setTimeout(async () => {
      last.current = { path, changes, at: performance.now() };
      const found = await get(path).catch(unlessLost);
      if (found && last.current.path === path) setAnswer({ ...found, at: performance.now() });
    }, Math.max(0, pause));
    return () => clearTimeout(timer);
  }, [path, version, changes]);
  return answer;
}

// The last lookups; only those that are new are fetched.
export function useLookups(version) {
  const [known, setKnown] = useState([]);
  const last = known.at(-1)?.number ?? 0;
  useEffect(() => {
    const control = new AbortController();
    get(`admin/cache/lookups?after=${last}`, { signal: control.signal })
      .then(({ lookups }) => lookups.length && setKnown((old) => [...old, ...lookups].slice(-KEPT)))
      .catch(unlessLost);
    return () => control.abort();
  }, [version]);
  return known;
}
