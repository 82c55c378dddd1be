// The models that are served, for a reader to choose from.

// The names of those that generate text; null where a token is needed first.
export async function servedModels(headers) {
  const response = await fetch("/v1/models", { headers });
  if (response.status === 401) return null;
  if (!response.ok) throw new Error(response.statusText);
  return (await response.json()).data.filter((model) => model.generates).map((model) => model.id);
}

// Offers them in a select, which is hidden where there is no choice.
export function offer(select, models) {
  const chosen = select.value;
  select.replaceChildren(...models.map((model) => new Option(model, model)));
  if (models.includes(chosen)) select.value = chosen;
  select.closest("label").hidden = models.length < 2;
}
