// Uses the operators' page as somebody in a browser does: a queue with the workers `one` and `two`, the request `endless`, and
// the dead letter `1-0` of the request `gone`. Arguments: the gateway's URL and an admin key.

import assert from "node:assert/strict";
import { open, passed } from "./browser.mjs";

const [url, key] = process.argv.slice(2);
const { browser, page, complaints, elsewhere, textOf } = await open(url);

const said = (text) => page.waitForFunction((part) => document.getElementById("status").textContent.includes(part), {}, text);
const shown = (table, text) =>
  page.waitForFunction((id, part) => document.getElementById(id).textContent.includes(part), {}, table, text);
const gone = (table, text) =>
  page.waitForFunction((id, part) => !document.getElementById(id).textContent.includes(part), {}, table, text);

async function enterKey(text) {
  await page.$eval("#key", (element, given) => {
    element.value = given;
    element.dispatchEvent(new Event("change"));
  }, text);
}

// Presses a button as the keyboard does: the table is drawn anew each second, so a place to click at may have moved.
async function press(target, question, answer) {
  await page.$eval(`button[data-target="${target}"]`, (button) => button.click());
  await page.waitForSelector("#sure[open]");
  assert.match(await textOf("#question"), question);
  await page.click(`#sure button[value="${answer}"]`);
  await page.waitForSelector("#sure:not([open])");
}

try {
  await page.goto(`${url}/operations`);
  await said("An admin key is needed");
  assert.equal((await page.$$("td")).length, 0);
  await enterKey("sk-penstock-wrong");
  await said("API key");
  assert.equal((await page.$$("td")).length, 0);
  assert.ok(complaints.length >= 1 && complaints.every((each) => each.includes("401")), complaints.join("\n"));
  passed("nothing is shown without a key");

  await enterKey(key);
  for (const [table, text] of [["workers", "one"], ["workers", "two"], ["requests", "endless"], ["letters", "gone"]]) {
    await shown(table, text);
  }
  await page.waitForFunction(() => document.getElementById("sparkline").getAttribute("points").split(" ").length >= 3);
  assert.doesNotMatch(await page.content(), /a secret prompt/);
  passed("workers, requests and dead letters are shown, live, without text");

  await press("endless", /^Cancel request endless\?/, "no");
  const tokens = await textOf("#requests");
  await page.waitForFunction((before) => document.getElementById("requests").textContent !== before, {}, tokens);
  await shown("requests", "endless");
  passed("what is answered with no is not done");

  await press("endless", /^Cancel request endless\?/, "yes");
  await said("endless was told");
  await gone("requests", "endless");
  passed("a request is cancelled");

  await press("one", /^Drain worker one\?/, "yes");
  await said("one was told");
  await gone("workers", "one");
  await shown("workers", "two");
  await press("1-0", /^Send .* 1-0 again/, "yes");
  await said("Sent again as gone.replay-1-0");
  await gone("letters", "gone");
  passed("a worker is drained, and a dead letter sent again");

  const kept = await page.evaluate(() => [JSON.stringify(localStorage), document.cookie]);
  assert.deepEqual(kept, ["{}", ""]);
  assert.ok(!page.url().includes(key));
  assert.deepEqual(elsewhere, []);
  assert.ok(complaints.every((each) => each.includes("401")), complaints.join("\n"));
  passed("the key is kept for this tab alone, and nothing is loaded from elsewhere");
} finally {
  await browser.close();
}
