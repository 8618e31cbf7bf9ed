// A page in Chromium, and what it complained of or asked others for.

import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

export const PATIENCE_MS = 30_000;

export async function launch() {
  return puppeteer.launch({
    args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
    executablePath: await chromium.executablePath(),
    headless: "shell",
  });
}

export async function open(url) {
  const browser = await launch();
  const page = await browser.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const complaints = [];
  const elsewhere = [];
  page.on("console", (message) => ["error", "warn"].includes(message.type()) && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(error.message));
  page.on("request", (request) => {
    if (!request.url().startsWith(`${url}/`) && !request.url().startsWith("data:")) elsewhere.push(request.url());
  });
  const textOf = (selector) => page.$eval(selector, (element) => element.textContent);
  return { browser, page, complaints, elsewhere, textOf };
}

export const passed = (what) => console.log(`passed: ${what}`);
