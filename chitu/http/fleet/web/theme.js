/* Light or dark: what the reader chose here, else what the system says. A classic script in the head, so that the page
 * never flashes in the wrong colours. The only writer of <html data-theme>. */
"use strict";
(() => {
  const KEY = "chitu.theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  // Storage may be forbidden (private windows, policies): the page works without it.
  const stored = () => {
    try {
      const theme = localStorage.getItem(KEY);
      return theme === "light" || theme === "dark" ? theme : null;
    } catch {
      return null;
    }
  };
  const store = (theme) => {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // The choice lasts as long as the page.
    }
  };

  let chosen = stored();
  const show = () => {
    root.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
  };
  show();
  system.addEventListener("change", show);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      store(chosen);
      show();
    });
  });
})();
