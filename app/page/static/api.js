// Calls of the server that the page came from. The key stays in this tab: sessionStorage, and nowhere else.

const KEY = "crosskv.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server refused. `status` is HTTP's, 0 where it was not reached, null for an error within a stream. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const from = (path) => new URL(path, document.baseURI).href;

/** A response that is no error. Raises ApiError with the server's own sentence. */
export async function call(path, { body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(from(path), {
      method: body === undefined ? "GET" : "POST",
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export const getJson = async (path, options) => (await call(path, options)).json();

async function refusal(response) {
  let message = `The server answered ${response.status}.`;
  let code;
  try {
    const { error } = await response.json();
    message = String(error.message);
    code = error.code;
  } catch {
    // A proxy's own page: the status says what there is to say.
  }
  const wait = response.headers.get("retry-after");
  if (wait && (response.status === 429 || response.status === 503)) message += ` (Retry after ${wait} s.)`;
  return new ApiError(message, response.status, code);
}

/** The server-sent events of a response, `{event, data}` with `data` as text. Comments are passed over. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let found = { event: "message", data: [] };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (found.data.length) yield { event: found.event, data: found.data.join("\n") };
          found = { event: "message", data: [] };
        } else if (line.startsWith("data:")) found.data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) found.event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A chat's answer as it comes: `{text}`, at last `{usage}`, and `{id}` with the first. Raises ApiError. */
export async function* answer(body, { replica, signal }) {
  const headers = replica === "" ? {} : { "X-CrossKV-Replica": replica };
  const response = await call("v1/chat/completions", {
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    headers,
    signal,
  });
  let ended = false;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(String(chunk.error.message), null, chunk.error.code);
    if (chunk.id) yield { id: chunk.id };
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  if (!ended) throw new ApiError("The answer broke off before its end.", null);
}
