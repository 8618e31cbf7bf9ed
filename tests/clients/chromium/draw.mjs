// Draws pages, and says what is wrong with each. Arguments: a file of shots as JSON (shots.py), and a folder for the pictures.

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { launch, PATIENCE_MS } from "./browser.mjs";
import { faultsOf } from "./faults.mjs";

const STEPS = {
  wait: (page, selector) => page.waitForSelector(selector),
  said: (page, selector, text) =>
    page.waitForFunction((at, part) => document.querySelector(at)?.textContent.includes(part), {}, selector, text),
  type: (page, selector, text) => page.type(selector, text),
  press: (page, key) => page.keyboard.press(key),
  click: (page, selector) => page.$eval(selector, (element) => element.click()),
};

async function draw(browser, shot, folder) {
  const context = await browser.createBrowserContext();
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const errors = [];
  page.on("pageerror", (error) => errors.push(`the script failed: ${error.message}`));
  page.on("dialog", (dialog) => errors.push(`it asks: ${dialog.message()}`));
  const { width, height, scheme, is_phone: isPhone } = shot.view;
  await page.setViewport({ width, height, isMobile: isPhone, hasTouch: isPhone, deviceScaleFactor: isPhone ? 2 : 1 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.evaluateOnNewDocument((session) => {
    for (const [key, value] of Object.entries(session)) sessionStorage.setItem(key, value);
  }, shot.session);
  if (shot.answer !== null) {
    await page.setRequestInterception(true);
    page.on("request", (request) => {
      if (!request.url().includes(shot.answer.part)) request.continue();
      else request.respond({ contentType: "application/json", body: JSON.stringify(shot.answer.body) });
    });
  }
  await page.goto(shot.url);
  for (const [step, ...given] of shot.steps) await STEPS[step](page, ...given);
  await page.evaluate(() => Promise.allSettled(document.getAnimations().map(({ finished }) => finished)));
  const faults = [...errors, ...(shot.is_judged ? await page.evaluate(faultsOf) : [])];
  const isAsking = await page.evaluate(() => document.querySelector("dialog[open]") !== null);
  if (isAsking !== shot.is_asking) faults.push(isAsking ? "a dialog is open" : "no dialog is open");
  await page.screenshot({ path: join(folder, `${shot.name}.png`) });
  await context.close();
  return faults;
}

const [shots, folder] = process.argv.slice(2);
const browser = await launch();
try {
  for (const shot of JSON.parse(await readFile(shots, "utf8"))) {
    try {
      for (const fault of await draw(browser, shot, folder)) console.log(`${shot.name}: ${fault}`);
    } catch (error) {
      console.log(`${shot.name}: not drawn: ${error.message}`);
    }
  }
} finally {
  await browser.close();
}
