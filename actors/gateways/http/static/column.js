// One prompt with its answer, streamed. Text of the model is only ever set as text, never as markup: markdown.js makes
// elements of a fixed set.

import { events } from "./events.js";
import { Markdown } from "./markdown.js";
import { offer } from "./models.js";

export class Column {
  // settings(): what all columns share; onChange(): called when it starts, ends or is removed.
  constructor(template, prompt, settings, onChange) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.settings = settings;
    this.onChange = onChange;
    this.stopper = null;
    const find = (name) => this.element.querySelector(name);
    this.prompt = find("textarea");
    this.models = find("select");
    this.answer = find(".answer");
    this.fault = find(".fault");
    this.shownText = new Markdown(find(".text"));
    this.runButton = find(".run");
    this.stopButton = find(".stop");
    this.shown = { ttft: find(".ttft"), speed: find(".speed"), count: find(".count"), state: find(".state") };
    this.prompt.value = prompt;
    find("form").addEventListener("submit", (event) => (event.preventDefault(), this.run()));
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.stopButton.addEventListener("click", () => this.stop());
    find(".remove").addEventListener("click", () => (this.stop(), this.element.remove(), this.onChange(this)));
  }

  offerModels(models) {
    offer(this.models, models);
  }

  get isRunning() {
    return this.stopper !== null;
  }

  stop() {
    this.stopper?.abort();
  }

  async run() {
    if (this.isRunning || !this.prompt.reportValidity()) return;
    this.stopper = new AbortController();
    this.begin();
    try {
      const response = await this.ask(this.stopper.signal);
      for await (const event of events(response.body)) this.take(event);
      this.shown.state.textContent = this.reason ?? "done";
    } catch (error) {
      if (error.name === "AbortError") this.shown.state.textContent = "stopped";
      else this.fail(error);
    } finally {
      this.stopper = null;
      this.shownText.show(this.text);
      this.mark(false);
    }
  }

  begin() {
    this.started = performance.now();
    this.first = this.last = null;
    this.count = 0;
    this.reason = null;
    this.text = "";
    this.shownText.show("");
    this.fault.hidden = true;
    for (const name of ["ttft", "speed", "count"]) this.shown[name].textContent = "–";
    this.shown.state.textContent = "waiting";
    this.mark(true);
  }

  mark(isRunning) {
    this.element.setAttribute("aria-busy", String(isRunning));
    this.runButton.disabled = isRunning;
    this.stopButton.disabled = !isRunning;
    this.onChange(this);
  }

  async ask(signal) {
    const { system, temperature, maxTokens, headers } = this.settings();
    const messages = [{ role: "user", content: this.prompt.value }];
    if (system) messages.unshift({ role: "system", content: system });
    const body = {
      model: this.models.value || undefined,
      messages,
      temperature,
      max_completion_tokens: maxTokens,
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    return response;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      this.count = event.usage.completion_tokens;
      this.shown.count.textContent = this.count;
    }
    const choice = event.choices[0];
    if (!choice) return;
    if (choice.finish_reason) this.reason = { stop: "done", length: "cut at most tokens" }[choice.finish_reason] ?? choice.finish_reason;
    if (choice.delta.content) this.write(choice.delta.content);
  }

  write(piece) {
    this.text += piece;
    this.shownText.showSoon(this.text);
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.shown.ttft.textContent = duration(this.first - this.started);
      this.shown.state.textContent = "streaming";
    }
    this.count += 1;
    this.shown.count.textContent = this.count;
    const seconds = (this.last - this.first) / 1000;
    if (seconds > 0.2) this.shown.speed.textContent = ((this.count - 1) / seconds).toFixed(1);
  }

  fail(error) {
    this.shown.state.textContent = "failed";
    this.fault.textContent = error.message;
    this.fault.hidden = false;
  }
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}
