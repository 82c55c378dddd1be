// A chat: the conversation is this page's, and all of it is sent with every message. What a model or a tool says is
// only ever set as text, never as markup: markdown.js makes elements of a fixed set.

import { events } from "./events.js";
import { Markdown } from "./markdown.js";
import { offer as offerModels, servedModels } from "./models.js";

const find = (id) => document.getElementById(id);
let messages = []; // as the API takes them, without the system prompt
let stopper = null;

function headers() {
  const token = find("token").value.trim();
  return { "content-type": "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}) };
}

function body() {
  const system = find("system").value.trim();
  const asked = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number(find("temperature").value),
    top_p: Number(find("top-p").value),
    max_completion_tokens: Number(find("max-tokens").value),
    model: find("models").value || undefined,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (find("seed").value !== "") asked.seed = Number(find("seed").value);
  const tools = find("tools").value.trim();
  if (tools) asked.tools = JSON.parse(tools);
  return JSON.stringify(asked);
}

function show(message, name) {
  const element = find("turn").content.firstElementChild.cloneNode(true);
  element.classList.add(message.role);
  element.querySelector("h2").textContent = name ?? { user: "You", assistant: "Model", tool: "Tool" }[message.role];
  element.querySelector(".text").textContent = message.content ?? "";
  find("turns").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

// Takes one answer of the model into the conversation.
async function answer() {
  if (stopper) return;
  stopper = new AbortController();
  const conversation = messages; // another one may have been begun meanwhile
  const said = { role: "assistant", content: "" };
  const calls = [];
  const element = show(said);
  const shown = new Markdown(element.querySelector(".text"));
  const started = performance.now();
  let tokens = 0;
  let state = "done";
  mark(element, true);
  find("state").textContent = "waiting";
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: body(), signal: stopper.signal });
    if (response.status === 401) find("token-field").hidden = !(find("settings").open = true);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices[0];
      if (!choice) continue;
      if (choice.finish_reason === "length") state = "cut at most tokens";
      const delta = choice.delta;
      if (delta.reasoning_content) think(element, delta.reasoning_content);
      if (delta.content) {
        find("state").textContent = "streaming";
        said.content += delta.content;
        shown.showSoon(said.content);
      }
      for (const piece of delta.tool_calls ?? []) {
        const call = (calls[piece.index] ??= { id: piece.id, type: "function", function: { name: piece.function.name, arguments: "" } });
        call.function.arguments += piece.function.arguments ?? "";
      }
    }
  } catch (error) {
    state = error.name === "AbortError" ? "stopped" : "failed";
    if (state === "failed") {
      const fault = element.querySelector(".fault");
      fault.textContent = error.message;
      fault.hidden = false;
    }
  }
  stopper = null;
  shown.show(said.content);
  const seconds = (performance.now() - started) / 1000;
  find("state").textContent = tokens && state !== "failed" ? `${state}: ${tokens} tokens in ${seconds.toFixed(1)} s` : state;
  // What failed is no part of the conversation, nor is a call that was cut short: nothing could follow it.
  if (calls.length && state === "done") said.tool_calls = calls;
  if (conversation === messages && state !== "failed" && (said.content || said.tool_calls)) {
    messages.push(said);
    said.tool_calls?.forEach((call) => offer(element, call));
  }
  mark(element, false);
}

function think(element, piece) {
  const thinking = element.querySelector(".thinking");
  thinking.hidden = false;
  thinking.querySelector("p").append(document.createTextNode(piece));
}

// Shows a call, and takes what the tool answered from whoever sits here.
function offer(element, call) {
  const form = find("call").content.firstElementChild.cloneNode(true);
  form.querySelector("strong").textContent = `calls ${call.function.name}`;
  form.querySelector("pre").textContent = call.function.arguments;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const result = { role: "tool", tool_call_id: call.id, content: form.querySelector("textarea").value };
    messages.push(result);
    form.querySelectorAll("button, label").forEach((each) => each.remove());
    show(result, `Tool ${call.function.name}`);
    if (!element.querySelector(".call button")) answer();
  });
  element.querySelector(".calls").append(form);
}

function mark(element, isRunning) {
  element.setAttribute("aria-busy", String(isRunning));
  find("send").disabled = isRunning;
  find("stop").disabled = !isRunning;
  find("again").disabled = isRunning || !messages.length;
  element.scrollIntoView({ block: "end" });
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stopper) return;
  const message = { role: "user", content: find("message").value };
  find("message").value = "";
  // Who says something else does not answer the calls before it.
  document.querySelectorAll(".call button, .call label").forEach((each) => each.remove());
  messages.push(message);
  show(message);
  answer();
});
find("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("ask").requestSubmit();
});
find("stop").addEventListener("click", () => stopper?.abort());
find("again").addEventListener("click", () => {
  if (messages.at(-1)?.role === "assistant") messages.pop();
  const last = find("turns").lastElementChild;
  if (last?.classList.contains("assistant")) last.remove();
  answer();
});
find("new").addEventListener("click", () => {
  stopper?.abort();
  messages = [];
  find("turns").replaceChildren();
  find("state").textContent = "";
  find("again").disabled = true;
  find("message").focus();
});
find("temperature").addEventListener("input", (event) => {
  find("temperature-shown").textContent = Number(event.target.value).toFixed(1);
});

async function showModels() {
  const models = await servedModels(headers());
  if (models === null) {
    find("token-field").hidden = false;
    find("settings").open = true;
    return;
  }
  offerModels(find("models"), models);
  find("model").textContent = models.length < 2 ? models.join() : `${models.length} models`;
}
find("token").addEventListener("change", showModels);
showModels();
find("message").focus();
