// Texts from the data are only ever set as textContent.
const at = (id) => document.getElementById(id);
const inputs = ["text", "not", "filter"].map(at);
const state = { images: [], like: [], unlike: [] }; // files, and results
let latest = 0;
let waiting;

function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function say(text, error = false) {
  at("status").textContent = text;
  at("status").className = error ? "error" : "";
}

function chip(kind, list, one, source, label) {
  const image = element("img", { src: source, alt: label });
  const remove = element("button", { type: "button", textContent: "×", ariaLabel: `remove ${label}` });
  remove.onclick = () => {
    state[list] = state[list].filter((other) => other !== one);
    refresh();
  };
  return element("li", { className: kind, title: label }, [image, kind === "not" ? "not this" : "", remove]);
}

function showParts() {
  at("parts").replaceChildren(
    ...state.images.map((one) => chip("", "images", one, one.address, one.file.name || "image")),
    ...state.like.map((one) => chip("", "like", one, one.thumbnail, one.path)),
    ...state.unlike.map((one) => chip("not", "unlike", one, one.thumbnail, one.path)),
  );
}

function shown(hit) {
  const image = hit.thumbnail ? element("img", { src: hit.thumbnail, alt: hit.path, loading: "lazy" }) : "";
  const button = (textContent, list) => {
    const made = element("button", { type: "button", textContent });
    made.onclick = () => {
      state[list] = [...state[list].filter((one) => one.id !== hit.id), hit];
      refresh();
      scrollTo({ top: 0 });
    };
    return made;
  };
  return element("li", { title: `${hit.path}\n${hit.source}` }, [
    image,
    element("b", {}, [element("span", { textContent: hit.rank }), element("span", { textContent: hit.similarity.toFixed(3) })]),
    hit.metadata.caption
      ? element("p", { textContent: hit.metadata.caption })
      : element("p", { className: "path" }, [element("bdi", { textContent: hit.path })]),
    element("div", { className: "do" }, [button("more like this", "like"), button("not this", "unlike")]),
  ]);
}

async function search(section, mine) {
  const [text, not, contains] = inputs.map((one) => one.value.trim());
  const query = new URLSearchParams({ k: 40, collection: section.dataset.collection });
  if (text) query.append("text", text);
  if (not) query.append("not", not);
  if (contains) query.append("where", `${at("column").value}:${contains}`);
  for (const one of state.like) query.append("like", one.id);
  for (const one of state.unlike) query.append("unlike", one.id);
  const options = {};
  if (state.images.length) {
    options.method = "POST";
    options.body = new FormData();
    for (const one of state.images) options.body.append("file", one.file, one.file.name || "image");
  }
  const answer = await fetch(`api/search?${query}`, options);
  const found = await answer.json();
  if (mine !== latest) return; // a later query was sent
  if (!answer.ok) throw new Error(typeof found.detail === "string" ? found.detail : "the query is invalid");
  section.querySelector(".hits").replaceChildren(...found.results.map(shown));
  if (!found.results.length) say("Nothing passes the filter.");
}

async function refresh() {
  const mine = ++latest;
  showParts();
  const sections = [...document.querySelectorAll("section[data-collection]")];
  const text = inputs[0].value.trim();
  history.replaceState(null, "", text ? `?q=${encodeURIComponent(text)}` : location.pathname);
  if (!text && !state.images.length && !state.like.length) {
    sections.forEach((one) => one.querySelector(".hits").replaceChildren());
    say("");
    return;
  }
  say("Searching …");
  const outcomes = await Promise.allSettled(sections.map((one) => search(one, mine)));
  if (mine !== latest) return;
  outcomes.forEach((one, i) => {
    if (one.status === "rejected") sections[i].querySelector(".hits").replaceChildren(); // of an earlier query
  });
  const failed = outcomes.find((one) => one.status === "rejected");
  if (failed) say(failed.reason.message, true);
  else if (at("status").textContent === "Searching …") say("");
}

function addFiles(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  state.images.push(...images.map((file) => ({ file, address: URL.createObjectURL(file) })));
  if (images.length) refresh();
  else if (files.length) say(`${files[0].name || "the file"} is not an image`, true);
}

for (const one of inputs)
  one.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(refresh, 250);
  });
at("column").addEventListener("change", refresh);
at("query").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(waiting);
  refresh();
});
at("upload").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", () => {
  addFiles(at("file").files);
  at("file").value = "";
});
document.addEventListener("paste", (event) => addFiles(event.clipboardData.files));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  addFiles(event.dataTransfer.files);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/INPUT|SELECT/.test(document.activeElement.tagName)) {
    event.preventDefault();
    inputs[0].focus();
  }
});
inputs[0].value = new URLSearchParams(location.search).get("q") || "";
if (inputs[0].value) refresh();
