// On a version's page: asks for its scores on logged rollouts, and shows them.
"use strict";
for (const button of document.querySelectorAll("button[data-function]")) {
  const result = document.getElementById("trial");
  button.addEventListener("click", async () => {
    button.disabled = true;
    result.textContent = `Scores rollouts, for at most ${result.dataset.seconds} s …`;
    try {
      const body = JSON.stringify({ function: button.dataset.function });
      const headers = { "content-type": "application/json" };
      const answer = await fetch(`/api/functions/${result.dataset.version}/trial`, { method: "POST", headers, body });
      const text = await answer.text();
      // The server has escaped all texts.
      if (answer.ok) result.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
      else result.textContent = `No scores: ${JSON.parse(text).detail}`;
    } catch (error) {
      result.textContent = `No scores: the page does not answer (${error.message}).`;
    } finally {
      button.disabled = false;
    }
  });
}
