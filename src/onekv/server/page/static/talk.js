// A conversation as a tree, and one answer to it.
//
// Every message knows the one before it. Editing one or having it answered anew adds a sibling, and nothing is lost:
// the server still has all that the branches have in common, once.

import { call, complaint, events } from "./link.js";

export class Talk {
  constructor() {
    this.root = { id: 0, children: [], chosen: 0, parent: null };
    this.next = 1;
  }

  // The message is the chosen one among its siblings.
  add(parent, role, content) {
    const message = { id: this.next++, role, content, thought: "", parent, children: [], chosen: 0, state: "done" };
    parent.children.push(message);
    parent.chosen = parent.children.length - 1;
    return message;
  }

  // From the first message to the last of the branch that is chosen.
  path() {
    const found = [];
    for (let at = this.root; at.children.length; found.push(at)) at = at.children[at.chosen];
    return found;
  }

  get last() {
    return this.path().at(-1) ?? this.root;
  }
}

// The messages before `answer`, as the API takes them.
function before(answer, system) {
  const messages = [];
  for (let at = answer.parent; at.parent !== null; at = at.parent) messages.unshift({ role: at.role, content: at.content });
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

// Generate `answer`, piece by piece; `changed` is called after each. Ends when it is complete, stopped or failed.
export async function generate(answer, { model, system, maxTokens, temperature }, signal, changed) {
  answer.state = "waiting";
  changed();
  const body = {
    model,
    messages: before(answer, system),
    max_tokens: maxTokens,
    temperature,
    stream: true,
    return_progress: true,
    stream_options: { include_usage: true },
  };
  const began = performance.now();
  let first = null;
  let complete = false;
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error(await complaint(response));
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      if (event.prompt_progress) progressed(answer, event.prompt_progress);
      const choice = event.choices?.[0];
      const { content, reasoning_content: thought } = choice?.delta ?? {};
      if (content || thought) {
        first ??= performance.now();
        answer.state = "streaming";
        answer.content += content ?? "";
        answer.thought += thought ?? "";
      }
      if (choice?.finish_reason) answer.finish = choice.finish_reason;
      if (event.usage) answer.usage = figures(event.usage, began, first ?? performance.now());
      changed();
    }
    if (!complete) throw new Error("the answer ended early");
    answer.state = "done";
  } catch (error) {
    answer.state = error.name === "AbortError" ? "stopped" : "failed";
    answer.error = error instanceof TypeError ? "the server cannot be reached" : error.message;
  }
  changed();
}

// Known before the answer is complete, and all that is known of one that is stopped.
function progressed(answer, progress) {
  answer.progress = progress;
  if (progress.processed === progress.total)
    answer.usage = { cached: progress.cache, computed: progress.total - progress.cache, generated: null, firstToken: null, speed: null };
}

function figures(usage, began, first) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const decoding = (performance.now() - first) / 1000;
  return {
    cached,
    computed: usage.prompt_tokens - cached,
    generated: usage.completion_tokens,
    firstToken: (first - began) / 1000,
    speed: usage.completion_tokens > 1 && decoding > 0 ? (usage.completion_tokens - 1) / decoding : null,
  };
}
