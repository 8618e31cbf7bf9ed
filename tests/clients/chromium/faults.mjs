// What is wrong with a page as it stands on the screen. The function runs in the page, so it uses nothing from outside.

export function faultsOf() {
  const faults = [];
  const nameOf = (element) =>
    `${element.tagName.toLowerCase()}${element.id && `#${element.id}`} "${element.textContent.trim().replace(/\s+/g, " ").slice(0, 40)}"`;
  const isShown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const root = document.scrollingElement;
  if (root.scrollWidth > root.clientWidth + 1) faults.push(`the page is ${root.scrollWidth} px wide on ${root.clientWidth}`);

  // What sticks out to the side can be reached where something around it scrolls.
  const scrolls = (element) => {
    for (let around = element.parentElement; around; around = around.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(around).overflowX)) return true;
    }
    return false;
  };
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((part) => part / 255);
  };
  const ancestorsOf = (element) => (element ? [...ancestorsOf(element.parentElement), element] : []);
  const isFixed = (element) => ancestorsOf(element).some((each) => getComputedStyle(each).position === "fixed");
  const probe = document.body.appendChild(document.createElement("div"));
  probe.style.background = "Canvas"; // as this page's colour scheme has it
  const backdrop = rgba(getComputedStyle(probe).backgroundColor).slice(0, 3);
  probe.remove();
  const over = ([r, g, b, a], below) => [r, g, b].map((part, place) => part * a + below[place] * (1 - a));
  const luminance = (color) => {
    const [r, g, b] = color.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // The colours as they are seen: each element over what is below it, with what its opacity leaves of it.
  const contrastOf = (element) => {
    let below = backdrop;
    let opacity = 1;
    for (const each of ancestorsOf(element)) {
      const style = getComputedStyle(each);
      opacity *= Number(style.opacity);
      const [r, g, b, a] = rgba(style.backgroundColor);
      below = over([r, g, b, a * opacity], below);
    }
    const [r, g, b, a] = rgba(getComputedStyle(element).color);
    const [light, dark] = [luminance(over([r, g, b, a * opacity], below)), luminance(below)].sort((x, y) => y - x);
    return (light + 0.05) / (dark + 0.05);
  };

  for (const element of document.body.querySelectorAll("*")) {
    if (!isShown(element) || element.closest("svg, noscript, script, style")) continue;
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim() !== "");
    if (!hasText && !element.matches("input, select, textarea, button, img")) continue;
    if ((box.right <= 0 || box.left >= innerWidth) && isFixed(element)) continue; // in a drawer that is closed
    if ((box.right > innerWidth + 1 || box.left < -1) && !scrolls(element)) faults.push(`outside the window: ${nameOf(element)}`);
    const hides = element.tagName !== "INPUT" && ["hidden", "clip"].includes(style.overflowX) && style.textOverflow !== "ellipsis";
    if (hides && element.scrollWidth > element.clientWidth + 1) faults.push(`cut off: ${nameOf(element)}`);
    if (!hasText || element.disabled || element.tagName === "OPTION") continue;
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5; // WCAG 2.2, 1.4.3
    const contrast = contrastOf(element);
    if (contrast < needed) faults.push(`contrast ${contrast.toFixed(2)} < ${needed}: ${nameOf(element)}`);
  }
  for (const table of document.querySelectorAll("table")) {
    const widths = new Set([...table.rows].map((row) => [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0)));
    if (widths.size > 1) faults.push(`rows of ${[...widths].join(" and ")} cells: ${nameOf(table)}`);
    const heads = [...(table.rows[0]?.cells ?? [])];
    const last = table.rows[table.rows.length - 1]?.cells;
    if (last && heads.some((head, place) => Math.abs(head.getBoundingClientRect().right - last[place]?.getBoundingClientRect().right) > 1)) {
      faults.push(`headings do not end where their columns do: ${nameOf(table)}`);
    }
  }
  return [...new Set(faults)];
}
