"use strict";
// Talks to the server. Addresses are relative, so that the page works behind any prefix.

const server = {token: sessionStorage.getItem("anywidth-token") || "", about: null};

class ServerError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = {...options.headers};
  if (server.token) headers.Authorization = `Bearer ${server.token}`;
  let reply;
  try {
    reply = await fetch(path, {...options, headers});
  } catch {
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (reply.ok) return reply;
  const text = await reply.text();
  let error = text;
  try {
    error = JSON.parse(text).error || text;
  } catch { /* not JSON: the text itself is the best there is */ }
  throw new ServerError(reply.status, error);
}

// Asks for a token until the server takes it, then for what the page is about.
async function signIn() {
  while (!(await (await ask("page/door")).json()).is_open) {
    const dialog = document.getElementById("token-dialog");
    dialog.showModal();
    await new Promise((done) => dialog.addEventListener("close", done, {once: true}));
    server.token = document.getElementById("token").value;
    sessionStorage.setItem("anywidth-token", server.token);
  }
  server.about = await (await ask("page/about")).json();
}

// Runs the network on an input: {file} is an image file, {tensor} a tensor of the protocol.
// `how` is {width} or {deadline_ms}. Returns {data or image, told}.
async function infer(input, how, wantsPicture) {
  const path = `v2/models/${encodeURIComponent(server.about.name)}/infer`;
  if (input.file) {
    const headers = {"Content-Type": input.file.type || "image/png"};
    if (wantsPicture) headers.Accept = "image/png";
    const query = new URLSearchParams(how).toString();
    const reply = await ask(`${path}?${query}`, {method: "POST", body: input.file, headers});
    if (!wantsPicture) return toldIn(await reply.json());
    const told = {};
    for (const name of ["width", "run-ms", "milliseconds", "multiply-adds", "in-time"]) {
      told[name.replace("-", "_")] = reply.headers.get(`Anywidth-${name}`);
    }
    for (const name of ["run_ms", "milliseconds", "multiply_adds"]) told[name] = Number(told[name]);
    told.width = Number.isNaN(Number(told.width)) ? told.width : Number(told.width);
    return {image: await reply.blob(), told};
  }
  const body = JSON.stringify({inputs: [input.tensor], parameters: how});
  const headers = {"Content-Type": "application/json"};
  return toldIn(await (await ask(path, {method: "POST", body, headers})).json());
}

function toldIn(data) {
  return {data, told: data.parameters};
}
