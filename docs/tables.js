// Numbers are compared by their last digits: a column of numbers is aligned to the right.
document.addEventListener("DOMContentLoaded", () => {
  const isNumber = (cell) => /^[−+-]?[\d.,]+( ?(%|ms|s|µs|MB|kB|GB|k))?$/.test(cell.textContent.trim());
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    [...(table.tHead?.rows[0]?.cells ?? [])].forEach((head, column) => {
      const cells = rows.map((row) => row.cells[column]).filter((cell) => cell?.textContent.trim());
      if (cells.length > 1 && cells.every(isNumber)) for (const cell of [head, ...cells]) cell.style.textAlign = "right";
    });
  }
  // Lines may break within a command, but not at the hyphens of its flags.
  for (const code of document.querySelectorAll(".md-typeset :is(p, li) > code")) {
    if (code.childElementCount) continue;
    const parts = code.textContent.split(/((?<!\S)-[^\s=]+)/);
    code.replaceChildren(...parts.map((text, index) => {
      const part = document.createElement("span");
      part.textContent = text;
      if (index % 2) part.style.whiteSpace = "nowrap";
      return part;
    }));
  }
});
