// The copy button of a console block copies the commands only: no prompts, no output.
document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".md-clipboard, .md-code__button");
  const code = button?.closest(".highlight")?.querySelector("code");
  if (!code?.querySelector(".gp")) return;
  const copy = code.cloneNode(true);
  copy.querySelectorAll(".gp, .go").forEach((part) => part.remove());
  const commands = copy.textContent.split("\n").filter((line) => line.trim());
  button.setAttribute("data-clipboard-text", commands.join("\n"));
}, true);
