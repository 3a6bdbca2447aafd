// Light, dark, or as the system says. The choice stays in the browser, where it lets us keep anything.

const KEY = "weir-dashboard-theme";

/** Follow the radio buttons called "theme", beginning with what was chosen last. */
export function followTheme(fieldset) {
  const chosen = remembered();
  for (const input of fieldset.querySelectorAll("input")) {
    input.checked = input.value === chosen;
    input.addEventListener("change", () => {
      apply(input.value);
      try {
        localStorage.setItem(KEY, input.value);
      } catch {
        // it is only a convenience
      }
    });
  }
  apply(chosen);
}

function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === "light" || kept === "dark" ? kept : "auto";
  } catch {
    return "auto";
  }
}

function apply(theme) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme);
}
