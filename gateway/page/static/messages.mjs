// Questions, answers and errors as items of the list of messages.

import { MarkdownView, newElement } from "./elements.mjs";

export function newItem(list, kind, text = "") {
  const item = newElement("li", { className: kind, textContent: text });
  list.append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

// An item that is written while its answer comes: reasoning folded, text, calls, and how fast it was.
export function newAnswerItem(list) {
  const item = newItem(list, "assistant");
  const reasoning = newElement("div", { className: "plain" });
  const details = newElement("details", { hidden: true }, [newElement("summary", { textContent: "Reasoning" }), reasoning]);
  const text = newElement("div", { className: "markdown" });
  const calls = newElement("div", { className: "plain" });
  const footer = newElement("footer");
  const waiting = newElement("div", { className: "waiting", textContent: "waiting for the first token" });
  item.append(details, text, calls, footer, waiting);
  const view = new MarkdownView(text);
  return {
    tellPrefill(done, total) {
      waiting.textContent = `reading the prompt: ${done.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} tokens`;
      waiting.hidden = false; // a takeover reads it again
    },
    show(answer) {
      waiting.hidden = true;
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      details.hidden = answer.reasoning === "";
      reasoning.textContent = answer.reasoning;
      view.show(answer.text);
      calls.textContent = answer.calls.map(({ function: { name, arguments: given } }) => `${name}(${given})`).join("\n");
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    },
    // Null: there is nothing to keep of it.
    end(answer, note) {
      this.show(answer);
      footer.textContent = note;
      if (note === null) item.remove();
    },
  };
}

// Shows an answer once per frame, however many chunks come in it.
export function perFrame(show) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      show();
    });
  };
}
