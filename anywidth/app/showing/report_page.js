// Sorts a table by the column whose heading is pressed; a second press turns the order round.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const body = heading.closest("table").tBodies[0];
    const column = heading.cellIndex;
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const value = (row) => {
      const number = parseFloat(row.cells[column].dataset.value);
      return Number.isNaN(number) ? Infinity : rising ? number : -number;
    };
    body.append(...[...body.rows].sort((one, other) => value(one) - value(other) || 0));
  });
}

// The spectrum becomes one to point at; without scripts its figure stays.
for (const data of document.querySelectorAll(".spectrum-data")) {
  drawSpectrum(data.nextElementSibling, JSON.parse(data.textContent));
}
