"""The HTTP endpoint: OpenAI's API, health and counters, and a page to try it."""
