"use strict";
// Shows what the network made of an input: classes, actions, or a larger picture.

const MOST_BARS = 5;

function softmax(values) {
  const largest = Math.max(...values);
  const powers = values.map((value) => Math.exp(value - largest));
  const sum = powers.reduce((one, other) => one + other, 0);
  return powers.map((power) => power / sum);
}

// Bars of the likeliest first. Elements are kept from call to call, so that bars glide.
function showBars(box, names, shares) {
  const order = shares.map((share, index) => [share, index]).sort((a, b) => b[0] - a[0]);
  const kept = order.slice(0, MOST_BARS);
  let list = box.querySelector(".bars");
  if (!list || list.children.length !== kept.length) {
    list = document.createElement("ol");
    list.className = "bars";
    for (const _ of kept) {
      const item = document.createElement("li");
      const name = document.createElement("div");
      name.className = "name";
      name.append(document.createElement("span"), document.createElement("span"));
      item.append(name, Object.assign(document.createElement("progress"), {max: 1}));
      list.append(item);
    }
    box.replaceChildren(list);
  }
  kept.forEach(([share, index], row) => {
    const item = list.children[row];
    item.querySelector("span:first-child").textContent = names[index] ?? `output ${index}`;
    item.querySelector("span:last-child").textContent = `${(100 * share).toFixed(1)} %`;
    item.querySelector("progress").value = share;
  });
}

function showClasses(box, answer) {
  const logits = answer.data.outputs[0].data;
  showBars(box, server.about.classes || [], softmax(logits));
}

function showActions(box, answer) {
  const [logits, values] = answer.data.outputs;
  showBars(box, server.about.actions || logits.data.map((_, k) => `action ${k}`), softmax(logits.data));
  let note = box.querySelector(".note");
  if (!note) {
    note = document.createElement("p");
    note.className = "note";
    box.append(note);
  }
  if (values) note.textContent = `It expects ${values.data[0].toFixed(2)} points from here.`;
}

// The picture that was sent, enlarged plainly, under the one that the network made.
const enlarged = {box: null, cut: 50, urls: []};

function showEnlarged(box, answer, input) {
  if (!box.querySelector(".compare")) {
    const compare = document.createElement("div");
    compare.className = "compare";
    const made = Object.assign(document.createElement("img"), {alt: "enlarged by the network"});
    const plain = document.createElement("div");
    plain.className = "plain";
    plain.append(Object.assign(document.createElement("img"), {alt: "plainly enlarged"}));
    const before = Object.assign(document.createElement("span"), {className: "tag", textContent: "plain"});
    const after = Object.assign(document.createElement("span"), {className: "tag", textContent: "network"});
    const cut = Object.assign(document.createElement("input"), {type: "range", min: 0, max: 100, value: 50});
    cut.setAttribute("aria-label", "How much of the plain picture to show");
    const follow = () => compare.style.setProperty("--cut", cut.value);
    cut.addEventListener("input", follow);
    compare.append(made, plain, before, after, cut);
    const note = document.createElement("p");
    note.className = "note";
    box.replaceChildren(compare, note);
    follow();
    new ResizeObserver(() => compare.style.setProperty("--full", `${compare.clientWidth}px`)).observe(compare);
  }
  const [made, plain] = box.querySelectorAll(".compare img");
  const url = URL.createObjectURL(answer.image);
  const old = made.src;
  made.onload = () => {
    if (old) URL.revokeObjectURL(old);
    const scale = server.about.scale || 2;
    const from = `${Math.round(made.naturalWidth / scale)} x ${Math.round(made.naturalHeight / scale)}`;
    box.querySelector(".note").textContent = `${from} pixels become ${made.naturalWidth} x ${made.naturalHeight}. Drag across the picture to compare.`;
  };
  made.src = url;
  if (plain.src !== input.url) plain.src = input.url;
}

function showResult(box, answer, input) {
  if (answer.image) showEnlarged(box, answer, input);
  else if (server.about.task === "reinforcement") showActions(box, answer);
  else showClasses(box, answer);
}
