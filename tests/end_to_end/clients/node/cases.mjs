// What every script asks, and how it tells what came: as `scripts/cases.py` has it for Python.
import { readFileSync } from "node:fs";

const read = (path) => JSON.parse(readFileSync(new URL(path, import.meta.url), "utf8"));

export const CASES = read("../cases.json");
export const URL_OF_SERVER = process.argv[2];
export const MODEL = "demo";
export const SCHEMA = CASES.tool.parameters;

export async function tell(name, cases) {
  const { version } = read(`./node_modules/${name}/package.json`);
  const told = { version };
  for (const [key, run] of Object.entries(cases)) {
    try {
      told[key] = await run();
    } catch (error) {
      told[key] = { failed: String(error.stack) };
    }
  }
  console.log(JSON.stringify(told));
}

export async function refused(kind, ask) {
  try {
    await ask();
  } catch (error) {
    if (error instanceof kind) return [error.status, error.message];
    throw error;
  }
  return ["nothing was raised"];
}
