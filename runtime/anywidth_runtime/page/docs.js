"use strict";
// Shows openapi.json: an address each, with its parameters, examples and answers.

function element(name, attributes, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

// Paragraphs, with what stands between backticks as code.
function paragraphs(text) {
  return (text || "").trim().split(/\n\s*\n/).filter(Boolean).map((part) => {
    const pieces = part.replace(/\s*\n\s*/g, " ").split("`");
    return element("p", {}, ...pieces.map((piece, k) => (k % 2 ? element("code", {textContent: piece}) : piece)));
  });
}

function rows(pairs) {
  return element("table", {}, element("tbody", {}, ...pairs.map(([name, text]) =>
    element("tr", {}, element("td", {}, element("code", {textContent: name})), element("td", {textContent: text})))));
}

// Numbers of one list on one line.
function compact(value) {
  return JSON.stringify(value, null, 2).replace(/\[[^[{]*?\]/g, (list) => list.replace(/\s+/g, " "));
}

function examples(path, method, name) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const url = `${base}${path.replace("{model}", name)}`;
  if (method !== "post") return `curl ${url}`;
  return [
    `curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg \\\n  '${url}?deadline_ms=20'`,
    `curl --json @request.json ${url}  # such as:`,
  ].join("\n");
}

function address(path, method, about, name) {
  const card = element("section", {className: "card address"},
    element("h2", {},
      element("span", {className: `method ${method}`, textContent: method.toUpperCase()}),
      element("code", {textContent: path}),
      element("span", {className: "faint", textContent: about.summary || ""})),
    ...paragraphs(about.description));
  const parameters = (about.parameters || []).filter((one) => one.in === "query");
  if (parameters.length) card.append(rows(parameters.map((one) => [one.name, one.description || ""])));
  card.append(element("pre", {textContent: examples(path, method, name)}));
  const body = about.requestBody && about.requestBody.content["application/json"];
  if (body && body.example) card.append(element("pre", {textContent: compact(body.example)}));
  const answers = Object.entries(about.responses).filter(([status]) => status !== "422");
  if (answers.length > 1) card.append(rows(answers.map(([status, one]) => [status, one.description])));
  return card;
}

async function show() {
  const schema = await (await fetch("openapi.json")).json();
  const main = document.getElementById("addresses");
  const name = schema.info.title.split(": ")[1];
  document.title = `${schema.info.title} · API`;
  main.append(element("p", {className: "faint", textContent: schema.info.description}));
  for (const [path, methods] of Object.entries(schema.paths)) {
    for (const [method, about] of Object.entries(methods)) main.append(address(path, method, about, name));
  }
}

show();
