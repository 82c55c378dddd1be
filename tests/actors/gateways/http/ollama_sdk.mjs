// The npm client of Ollama: node ollama_sdk.mjs URL FOLDER. It prints JSON, as client_programs.py does.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [url, folder] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/`));
const { Ollama } = await import(pathToFileURL(require.resolve("ollama")));
const ollama = new Ollama({ host: url.replace(/\/v1$/, "") });
const messages = [{ role: "user", content: "Well?" }];
const options = { num_predict: 5, temperature: 0 };

function check(condition, what) {
  if (!condition) throw new Error(what);
}

const tried = {
  "chat, whole and streamed": async () => {
    const whole = await ollama.chat({ model: "model", messages, options });
    let text = "";
    for await (const piece of await ollama.chat({ model: "model", messages, options, stream: true })) {
      text += piece.message.content;
    }
    check(text === whole.message.content && whole.done_reason === "length", JSON.stringify(whole));
  },
  "generate, structured": async () => {
    const properties = { name: { enum: ["red"] } };
    const format = { type: "object", properties, required: ["name"], additionalProperties: false };
    const answer = await ollama.generate({ model: "model", prompt: "Which?", format, options: { num_predict: 60 } });
    check(JSON.parse(answer.response).name === "red", answer.response);
  },
  "a stream that is aborted": async () => {
    const stream = await ollama.chat({ model: "model", messages, stream: true, options: { num_predict: 900 } });
    try {
      for await (const _ of stream) stream.abort();
      check(false, "it was not aborted");
    } catch (error) {
      check(error.name === "AbortError", String(error));
    }
  },
  "list, ps and show": async () => {
    const { models } = await ollama.list();
    check(models.length === 1 && (await ollama.ps()).models.length === 1, JSON.stringify(models));
    check((await ollama.show({ model: models[0].model })).capabilities.includes("completion"), "show");
  },
};

const passed = [];
const failed = {};
for (const [what, run] of Object.entries(tried)) {
  try {
    await run();
    passed.push(what);
  } catch (error) {
    failed[what] = String(error.stack ?? error);
  }
}
const { version } = JSON.parse(readFileSync(`${folder}/node_modules/ollama/package.json`, "utf8"));
console.log(JSON.stringify({ version, passed, failed }));
