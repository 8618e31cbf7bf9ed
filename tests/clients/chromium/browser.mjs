// A page in Chromium, and what it complained of or asked others for.

import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

export async function open(url) {
  const browser = await puppeteer.launch({
    args: ["--no-sandbox", "--disable-gpu", "--no-zygote", "--single-process", "--disable-dev-shm-usage"],
    executablePath: await chromium.executablePath(),
    headless: "shell",
  });
  const page = await browser.newPage();
  page.setDefaultTimeout(30_000);
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
