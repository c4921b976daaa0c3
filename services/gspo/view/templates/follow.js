// In every tab: hears of the log's changes, and shows a view that someone opens here by POST /api/view.
"use strict";
(() => {
  const KEY = "opened";
  const here = () => location.pathname + location.search;
  const notice = document.getElementById("opened");

  function offer(view) {
    const text = document.createElement("span");
    text.textContent = view.note ? `Opened for you: ${view.note}` : "Opened for you.";
    const close = Object.assign(document.createElement("button"), { textContent: "Stay here" });
    close.addEventListener("click", () => { sessionStorage.removeItem(KEY); notice.hidden = true; });
    notice.replaceChildren(text);
    if (view.from !== here()) {
      const back = Object.assign(document.createElement("a"), { href: view.from, textContent: "Back to where you were" });
      back.addEventListener("click", () => sessionStorage.removeItem(KEY));
      notice.append(back);
    }
    notice.append(close);
    notice.hidden = false;
  }

  function show(view) {
    const target = new URL(view.path, location.origin);
    if (target.origin !== location.origin) return;
    // A second view while the first is shown: back is still the reader's own place.
    const earlier = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
    const from = earlier?.path === here() ? earlier.from : here();
    const shown = { path: target.pathname + target.search, note: view.note, from };
    sessionStorage.setItem(KEY, JSON.stringify(shown));
    if (shown.path === here()) offer(shown);
    if (target.href !== location.href) location.assign(target.href);
  }

  const opened = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
  if (opened?.path === here()) offer(opened);
  else if (opened) sessionStorage.removeItem(KEY);

  // A browser has six connections to one server: the tabs share one stream, if they may lock.
  const others = new BroadcastChannel("changes");
  const receive = ([name, detail]) => (name === "view" ? show(detail) : dispatchEvent(new CustomEvent(`log-${name}`)));
  const tell = (name, detail) => { others.postMessage([name, detail]); receive([name, detail]); };
  others.onmessage = (event) => receive(event.data);
  function listen() {
    const changes = new EventSource("/api/changes");
    changes.onopen = () => tell("followed");
    changes.onerror = () => tell("lost");
    changes.onmessage = () => tell("changed");
    changes.addEventListener("view", (event) => tell("view", JSON.parse(event.data)));
    return new Promise(() => {});
  }
  if (navigator.locks) navigator.locks.request("changes", listen);
  else listen();
})();
