// Uses the page of a gateway of one model as somebody in a browser does. Argument: the gateway's URL.

import assert from "node:assert/strict";
import { open, passed } from "./browser.mjs";

const url = process.argv[2];
const { browser, page, complaints, elsewhere, textOf } = await open(url);

// The button is still enabled between a press and the request: an answer that is there says that it was sent.
const untilAnswered = (count) => page.waitForFunction((wanted) => {
  const isIdle = !document.getElementById("send").disabled;
  return isIdle && document.querySelectorAll("#messages li.assistant").length >= wanted;
}, {}, count);

async function ask(text, fields) {
  for (const [id, value] of Object.entries({ max_tokens: "", more: "", ...fields })) {
    await page.$eval(`#${id}`, (element, given) => {
      element.value = given;
      element.dispatchEvent(new Event("input", { bubbles: true }));
    }, value);
  }
  await page.type("#text", text);
}

// In the page, as the answer may be complete by the time that another process has seen its beginning.
async function stopAtFirstText() {
  await page.evaluate(() => {
    const observer = new MutationObserver(() => {
      if (!document.querySelector("#messages li:last-child.assistant .markdown")?.textContent) return;
      observer.disconnect();
      document.getElementById("stop").click();
    });
    observer.observe(document.getElementById("messages"), { childList: true, subtree: true, characterData: true });
  });
}

try {
  await page.goto(`${url}/`);
  await page.waitForFunction(() => document.getElementById("model").options.length === 1);
  passed("models are listed");

  await ask("Is it noon?", { max_tokens: "12" });
  const shown = JSON.parse((await textOf("#json")).split("\n\n").slice(1).join("\n\n"));
  assert.equal(shown.max_tokens, 12);
  assert.deepEqual(shown.messages, [{ role: "user", content: "Is it noon?" }]);
  assert.match(await textOf("#curl"), /^curl .*Is it noon\?/s);
  passed("the request is shown");

  await page.keyboard.press("Enter");
  await untilAnswered(1);
  assert.equal((await page.$$("#messages li")).length, 2);
  assert.match(await textOf("#messages li.assistant footer"), /^\d+ tokens, first token after \d+ ms, [\d.]+ tokens\/s, \w+$/);
  passed("an answer is streamed, and says how fast it was");

  await ask("Tell me a long story.", { more: '{"ignore_eos": true}' });
  await stopAtFirstText();
  await page.click("#send");
  await untilAnswered(2);
  assert.equal(await page.$eval("#messages li:last-child footer", (element) => element.textContent), "stopped");
  passed("an answer is stopped");

  await ask("Again.", { more: '{"temperatur": 1}' });
  await page.click("#send");
  await page.waitForSelector("#messages li.error");
  assert.match(await textOf("#messages li.error"), /did you mean temperature/);
  assert.equal(complaints.length, 1, complaints.join("\n"));
  assert.match(complaints.pop(), /status of 400/);
  passed("an error is shown");

  await page.type("#key", "sk-secret");
  await page.click("#reload");
  const kept = await page.evaluate(() => [JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]);
  assert.doesNotMatch(kept[0] + kept[1], /sk-secret/);
  assert.match(kept[0], /Is it noon/);
  assert.match(kept[2], /sk-secret/);
  assert.doesNotMatch(await textOf("#curl"), /sk-secret/);
  passed("a key is kept for this tab alone");

  const escaped = await page.evaluate(async () => {
    const script = document.createElement("script");
    script.textContent = "window.wasRun = true";
    document.head.append(script);
    return window.wasRun === true || (await fetch("https://example.invalid/").then(() => true, () => false));
  });
  assert.equal(escaped, false);
  assert.ok(complaints.some((each) => each.includes("Content Security Policy")), complaints.join("\n"));
  assert.deepEqual(elsewhere, []);
  passed("nothing of elsewhere is loaded or run");
} finally {
  await browser.close();
}
