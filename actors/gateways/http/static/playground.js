// The page: settings, columns, and the load of the service.

import { Chart } from "./chart.js";
import { Column } from "./column.js";
import { servedModels } from "./models.js";

const POLL_MS = 500;
// The rate is that of so many polls: of a slow model, few tokens come between two.
const RECENT = 4;
// A browser opens six connections to one host; one of them is for the load.
const MAX_COLUMNS = 5;
const PROMPTS = [
  "What is the capital of France, and what is it known for?",
  "Explain to a child why the sky is blue.",
  "Write a haiku about a queue that never gets longer.",
  "Give me three tips for growing tomatoes on a balcony.",
];

const find = (id) => document.getElementById(id);
const columns = [];
let models = []; // that are served
let slots = null;
let recent = []; // the last counts of tokens, and when they came

const rateChart = new Chart(find("rate-chart"), "--accent");
const slotsChart = new Chart(find("slots-chart"), "--second", () => slots);

function headers() {
  const token = find("token").value.trim();
  return token ? { authorization: `Bearer ${token}` } : {};
}

function settings() {
  return {
    system: find("system").value.trim(),
    temperature: Number(find("temperature").value),
    maxTokens: Number(find("max-tokens").value),
    headers: headers(),
  };
}

function addColumn(prompt) {
  const column = new Column(find("column"), prompt, settings, changed);
  column.offerModels(models);
  columns.push(column);
  find("columns").append(column.element);
  changed(column);
  return column;
}

function changed(column) {
  if (!column.element.isConnected) columns.splice(columns.indexOf(column), 1);
  find("add").disabled = columns.length >= MAX_COLUMNS;
  find("stop-all").disabled = !columns.some((each) => each.isRunning);
  find("run-all").disabled = columns.length > 0 && columns.every((each) => each.isRunning);
}

async function poll() {
  try {
    await Promise.all([showHealth(), showStats()]);
  } catch {
    badge("unreachable", false);
    recent = [];
  }
  setTimeout(poll, document.hidden ? 4 * POLL_MS : POLL_MS);
}

// Asked for once, and again where the stats name other models, as after a restart.
async function showModels(names) {
  if (names === find("model").textContent) return;
  models = (await servedModels(headers())) ?? [];
  columns.forEach((column) => column.offerModels(models));
  find("model").textContent = names;
}

async function showHealth() {
  const health = await (await fetch("/health")).json();
  badge(health.status, health.status === "ready");
}

function badge(text, isReady) {
  const element = find("health");
  if (element.textContent !== text) element.textContent = text;
  element.className = `badge ${isReady ? "ready" : "bad"}`;
}

async function showStats() {
  const response = await fetch("/stats", { headers: headers() });
  if (response.status === 401) {
    find("token-field").hidden = false;
    recent = [];
    return;
  }
  if (!response.ok) throw new Error(response.statusText);
  const stats = await response.json();
  // Several models: each one's own stats, and the sums of what can be counted. One that is down has none.
  const each = Object.values(stats.by_model ?? { only: stats });
  const now = performance.now() / 1000;
  slots = stats.n_parallel ?? 0;
  await showModels(each.map(({ model, runner, engine }) => `${model} · ${runner ?? engine}`).join(", "));
  find("slots").textContent = slots;
  find("running").textContent = stats.requests_running ?? 0;
  find("waiting").textContent = stats.requests_waiting ? `${stats.requests_waiting} waiting` : "";
  const generated = stats.generation_tokens ?? 0;
  find("tokens").textContent = generated.toLocaleString("en");
  find("batch").textContent = each.map(({ mean_batch_size: size }) => size?.toFixed(2) ?? "–").join(" / ");
  const used = stats.kv_blocks_max ? stats.kv_blocks_used / stats.kv_blocks_max : 0;
  find("kv").textContent = `${Math.round(100 * used)} %`;
  find("kv-bar").style.width = `${100 * used}%`;
  slotsChart.add(now, stats.requests_running ?? 0);
  // A service that was restarted counts from 0 again.
  if (recent.length && generated < recent[0].tokens) recent = [];
  recent = [...recent.slice(-RECENT), { now, tokens: generated }];
  const since = recent[0];
  const rate = now > since.now ? (generated - since.tokens) / (now - since.now) : 0;
  find("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
  rateChart.add(now, rate);
}

find("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  for (const column of columns) column.run();
});
find("stop-all").addEventListener("click", () => columns.forEach((column) => column.stop()));
find("add").addEventListener("click", () => addColumn("").prompt.focus());
find("temperature").addEventListener("input", (event) => {
  find("temperature-shown").textContent = Number(event.target.value).toFixed(1);
});
PROMPTS.forEach(addColumn);
poll();
