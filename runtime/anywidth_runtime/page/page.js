"use strict";
// Puts the page together: an input, the network's answer to it, the dial, the governor.

const SMALL_PIXELS = 100;
const MOST_SENT = 1024;
const MOST_ENLARGED = 256;
const OWN_REQUEST_MS = 500;
const page = {input: null, isRunning: false, isWaiting: false, hasFailed: false, timer: null};

function showMessage(text) {
  const message = document.getElementById("message");
  message.hidden = !text;
  message.textContent = text || "";
}

// Runs the present input at the present width. One request at a time: the latest wish wins.
async function run() {
  if (!page.input) return;
  if (page.isRunning) {
    page.isWaiting = true;
    return;
  }
  page.isRunning = true;
  do {
    page.isWaiting = false;
    const input = page.input;
    const how = governor.isOn
      ? {deadline_ms: presentDeadline()}
      : {width: widths.rows[widths.current].width};
    try {
      const answer = await infer(input, how, server.about.makes_pictures);
      if (input === page.input) {
        showResult(document.getElementById("result"), answer, input);
        if (governor.isOn) showWidth(indexOfWidth(answer.told.width));
        showLatency(answer.told.run_ms);
        showMultiplyAdds(answer.told.multiply_adds);
        if (page.hasFailed) showMessage("");
        page.hasFailed = false;
      }
    } catch (error) {
      // Under load a request may be dropped; the next one is on its way.
      page.hasFailed = !(governor.isOn && error.status === 503);
      if (page.hasFailed) showMessage(error.message);
    }
  } while (page.isWaiting);
  page.isRunning = false;
}

function choose(input, name) {
  if (page.input && page.input.isOwn) URL.revokeObjectURL(page.input.url);
  page.input = input;
  showMessage("");
  const picture = document.getElementById("picture");
  picture.onload = () => picture.classList.toggle("small", picture.naturalWidth < SMALL_PIXELS);
  picture.src = input.url;
  picture.hidden = false;
  picture.alt = name;
  document.getElementById("drop-hint").hidden = true;
  document.getElementById("picture-name").textContent = name;
  run();
}

// Large pictures are made small before they are sent: the middle of one that is to be enlarged,
// the whole of one that is to be recognised.
async function fitting(file) {
  const bitmap = await createImageBitmap(file);
  const most = server.about.makes_pictures ? MOST_ENLARGED : MOST_SENT;
  if (Math.max(bitmap.width, bitmap.height) <= most) return file;
  const scale = server.about.makes_pictures ? 1 : most / Math.max(bitmap.width, bitmap.height);
  const size = [bitmap.width, bitmap.height].map((side) => Math.min(most, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), {width: size[0], height: size[1]});
  const [across, down] = [bitmap.width * scale, bitmap.height * scale];
  canvas.getContext("2d").drawImage(bitmap, (size[0] - across) / 2, (size[1] - down) / 2, across, down);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

async function chooseFile(file) {
  if (!file) return;
  if (!server.about.takes_pictures) {
    showMessage(`This network takes no pictures: it takes ${server.about.takes}.`);
    return;
  }
  press(null);
  let sent;
  try {
    sent = await fitting(file);
  } catch {
    showMessage(`${file.name} is not a picture that this browser can read.`);
    return;
  }
  const part = sent !== file && server.about.makes_pictures ? ", the middle of it" : "";
  choose({file: sent, url: URL.createObjectURL(sent), isOwn: true}, file.name + part);
}

function press(button) {
  for (const one of document.querySelectorAll("#examples button[aria-pressed]")) {
    one.setAttribute("aria-pressed", String(one === button));
  }
}

async function chooseExample(number, button) {
  const example = server.about.examples[number];
  const url = button.querySelector("img").src;
  press(button);
  if (example.is_tensor) {
    const tensor = await (await ask(`page/examples/${number}.json`)).json();
    choose({tensor, url}, example.name);
    return;
  }
  const file = await (await ask(`page/examples/${number}.png`)).blob();
  choose({file, url}, example.name);
}

async function setUpExamples() {
  const box = document.getElementById("examples");
  for (const [number, example] of server.about.examples.entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = example.name;
    button.setAttribute("aria-pressed", "false");
    // Fetched by hand: an image element cannot bring a token.
    const file = await (await ask(`page/examples/${number}.png`)).blob();
    const image = Object.assign(document.createElement("img"), {alt: example.name});
    image.onload = () => image.classList.toggle("small", image.naturalWidth < SMALL_PIXELS);
    image.src = URL.createObjectURL(file);
    button.append(image);
    button.addEventListener("click", () => chooseExample(number, button));
    box.append(button);
    if (number === 0) chooseExample(0, button);
  }
  const add = Object.assign(document.createElement("button"), {type: "button", className: "add", textContent: "+", title: "Choose an image"});
  add.addEventListener("click", () => document.getElementById("file").click());
  if (server.about.takes_pictures) box.append(add);
}

function setUpDropping() {
  const drop = document.getElementById("drop");
  document.getElementById("file").addEventListener("change", (event) => chooseFile(event.target.files[0]));
  // The whole page takes a picture, wherever it is let go.
  for (const name of ["dragover", "drop", "dragleave"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") chooseFile(event.dataTransfer.files[0]);
    });
  }
  document.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
    if (file) chooseFile(file);
  });
}

const TITLES = {
  classification: "What is in the picture",
  super_resolution: "Enlarge a picture",
  reinforcement: "What to do next",
};

async function start() {
  await signIn();
  const about = server.about;
  document.title = `${about.name} · anywidth`;
  document.getElementById("model").textContent = about.name;
  document.getElementById("try-title").textContent = TITLES[about.task] || "Try an input";
  document.querySelector(".try").classList.toggle("enlarges", about.makes_pictures);
  if (!about.takes_pictures) {
    document.getElementById("file").disabled = true;
    document.getElementById("drop-hint").textContent = `It takes ${about.takes}.`;
  }
  setUpWidths(about, run);
  setUpGovernor((isOn) => {
    clearInterval(page.timer);
    if (isOn) page.timer = setInterval(run, OWN_REQUEST_MS);
    run();
  });
  document.getElementById("governor").hidden = !about.has_load;
  setUpDropping();
  await setUpExamples();
}

start().catch((error) => showMessage(error.message));
