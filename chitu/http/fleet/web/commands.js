/* What to type to change or check this cluster, with its address and the names of its instances. Pure but for the
 * elements that it fills. */

/** @returns {[string, string][]} what it does, the command */
export function commandsOf(instances, url) {
  const at = url === "http://127.0.0.1:21003" ? "" : ` --url ${url}`;
  const last = (role) => instances.findLast((instance) => instance.role === role && instance.status === "up")?.name;
  const [p, d, u, e] = ["prefill", "decode", "unified", "encode"].map(last);
  const decoding = instances.filter((instance) => instance.role === "decode" && instance.status === "up");
  const leaving = d ?? p ?? u ?? e;
  return [
    ["talk to it in a terminal", `chitu chat${at}`],
    [`one more ${u && !d ? "U" : "D"}, on the machine where you type it`, `chitu join ${u && !d ? "unified" : "decode"}${at}`],
    ...(leaving ? [[`let ${leaving} finish and leave`, `chitu drain ${leaving}${at}`]] : []),
    ...(decoding.length > 1 ? [[`make a P of ${d}; its weights and its cache stay`, `chitu role ${d} prefill${at}`]] : []),
    ["whether each pair answers right", `chitu verify${at}`],
  ];
}

export function showCommands(menu, instances) {
  const commands = commandsOf(instances, location.origin);
  const key = JSON.stringify(commands);
  if (menu.dataset.shown === key) return;
  menu.dataset.shown = key;
  menu.querySelector(".panel").replaceChildren(
    ...commands.flatMap(([what, command]) => [
      Object.assign(document.createElement("dt"), { textContent: what }),
      Object.assign(document.createElement("dd"), { textContent: command }),
    ]),
  );
}
