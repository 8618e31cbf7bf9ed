// Chats that this browser keeps, the last one first. A chat has an id, a model, a system message and messages.

const KEY = "penstock-chats";
const MOST = 50;

export class ChatHistory {
  #storage;
  #unsaved = null; // the chats, where the browser keeps nothing

  // `storage` is the browser's, or null where it refuses one.
  constructor(storage) {
    this.#storage = storage;
  }

  // Other tabs write, too: they are read anew each time. What is damaged is left out.
  chats() {
    if (this.#unsaved !== null) return this.#unsaved;
    try {
      const stored = JSON.parse(this.#storage.getItem(KEY) ?? "[]");
      return Array.isArray(stored) ? stored.filter(isChat) : [];
    } catch {
      return [];
    }
  }

  // Puts a chat first. The oldest ones go where there are too many, or where the browser's space ends.
  // Returns whether it is kept when the page is closed.
  keep(chat) {
    const chats = [chat, ...this.chats().filter(({ id }) => id !== chat.id)].slice(0, MOST);
    for (let count = chats.length; count > 0; count = Math.floor(count / 2)) {
      try {
        this.#storage.setItem(KEY, JSON.stringify(chats.slice(0, count)));
        this.#unsaved = null;
        return true;
      } catch {
        // it may have space for fewer
      }
    }
    this.#unsaved = chats;
    return false;
  }

  clear() {
    this.#unsaved = null;
    this.#storage?.removeItem(KEY);
  }
}

function isChat(chat) {
  return (
    chat !== null && typeof chat === "object" && [chat.id, chat.model, chat.system].every((each) => typeof each === "string") &&
    Array.isArray(chat.messages) && chat.messages.length > 0 && chat.messages.every(isMessage)
  );
}

function isMessage(message) {
  return (
    message !== null && typeof message === "object" && ["user", "assistant"].includes(message.role) && typeof message.content === "string" &&
    [message.reasoning, message.note].every((each) => ["string", "undefined"].includes(typeof each)) &&
    (message.tool_calls === undefined || callsAreWhole(message.tool_calls))
  );
}

function callsAreWhole(calls) {
  return Array.isArray(calls) && calls.every((call) => ["name", "arguments"].every((name) => typeof call?.function?.[name] === "string"));
}

// What a chat is called: the beginning of its first question.
export function titleOf({ messages }) {
  const line = messages[0].content.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}\u2026` : line;
}
