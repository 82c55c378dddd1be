// The Vercel AI SDK over a tiny model: node ai_sdk.mjs URL FOLDER, where FOLDER has node_modules.
// Prints, as JSON, its version and what passed.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, folder] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, stepCountIs, tool, Output } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const provider = createOpenAICompatible({ name: "genbatch", baseURL: url, supportsStructuredOutputs: true });
const schema = z.object({ name: z.enum(["red", "green", "blue"]) });

// A random model chooses the tool or the answer; in some run it does the one and then the other.
async function untilLooked(ask) {
  const faults = [];
  for (let seed = 0; seed < 20; seed += 1) {
    const looked = [];
    const look = tool({
      description: "Looks somewhere",
      inputSchema: z.object({ place: z.enum(["here", "there"]) }),
      execute: async ({ place }) => { looked.push(place); return "nothing"; },
    });
    try {
      const output = await ask({
        model: provider.chatModel("model"), prompt: "Which?", tools: { look }, output: Output.object({ schema }),
        stopWhen: stepCountIs(30), temperature: 1, seed, maxOutputTokens: 400, maxRetries: 0,
      });
      schema.parse(output);
    } catch (error) {
      faults.push(String(error));
      continue;
    }
    if (looked.length) return;
  }
  throw new Error(`it never looked and answered: ${faults.slice(0, 3)}`);
}

const tried = {
  "Output.object with tools": () => untilLooked(async (asked) => (await generateText(asked)).output),
  "Output.object with tools, streamed": () => untilLooked(async (asked) => {
    const said = streamText({ ...asked, onError: () => {} });
    for await (const _ of said.textStream);
    return await said.output;
  }),
};
const passed = [];
const failed = {};
for (const [what, run] of Object.entries(tried)) {
  try {
    await run();
    passed.push(what);
  } catch (error) {
    failed[what] = String(error.stack);
  }
}
console.log(JSON.stringify({ version: require("ai/package.json").version, passed, failed }));
