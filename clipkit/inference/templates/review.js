const choices = [...document.querySelectorAll("select")];
const chosen = () => choices.filter((one) => one.value);
const cell = (text) => `"${text.replaceAll('"', '""')}"`;
document.addEventListener("change", () => {
  const count = chosen().length;
  document.getElementById("count").textContent = `${count} ${count === 1 ? "correction" : "corrections"}`;
});
document.getElementById("review").addEventListener("submit", (event) => {
  event.preventDefault();
  const lines = chosen().map((one) => `${cell(one.dataset.image)},${cell(one.value)}\n`);
  const table = new Blob(["image_path,caption\n", ...lines], { type: "text/csv" });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(table), download: "corrections.csv" });
  link.click();
});
