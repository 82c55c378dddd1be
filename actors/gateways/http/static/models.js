// The models that are served, for a reader to choose from.

// Of each name whether the model is loaded, unloaded, loading or failed.
const states = new Map();

// The names of those that generate text; null where a token is needed first.
export async function servedModels(headers) {
  const response = await fetch("/v1/models", { headers });
  if (response.status === 401) return null;
  if (!response.ok) throw new Error(response.statusText);
  const models = (await response.json()).data;
  for (const model of models) states.set(model.id, model.status?.value ?? "loaded");
  return models.filter((model) => model.generates).map((model) => model.id);
}

// Offers them in a select, which is hidden where there is no choice.
export function offer(select, models) {
  const chosen = select.value;
  const label = (model) => (states.get(model) === "loaded" ? model : `${model} (${states.get(model)})`);
  select.replaceChildren(...models.map((model) => new Option(label(model), model)));
  if (models.includes(chosen)) select.value = chosen;
  select.closest("label").hidden = models.length < 2;
}
