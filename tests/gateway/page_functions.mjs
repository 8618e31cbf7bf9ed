// Tries the functions of the page under node: each line on stdin is `[name, ...arguments]`, each on stdout the result.

import { createInterface } from "node:readline";
import * as page from "../../gateway/page/static/requests.mjs";
import * as tables from "../../gateway/page/static/tables.mjs";

const functions = {
  ...page,
  ...tables,
  // The data of the events in pieces of text.
  events: (pieces) => {
    const reader = new page.EventReader();
    return pieces.flatMap((piece) => reader.feed(piece));
  },
  // An answer and its message, out of the data of events.
  answer: (datas) => {
    const answer = page.newAnswer();
    for (const data of datas) page.addTo(answer, data);
    return { ...answer, message: page.messageOf(answer) };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...given] = JSON.parse(line);
  try {
    console.log(JSON.stringify(functions[name](...given)));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message }));
  }
}
