// The search of the site runs in a worker, which browsers refuse to pages from a disk. There this one runs its script in a frame.

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #window; // of the frame, once its script has run

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.#window = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = url;
          script.addEventListener("load", () => resolve(inside));
          inside.document.body.append(script);
        }, { once: true });
      });
      frame.srcdoc = "<!doctype html>";
      document.body.append(frame);
    }

    postMessage(data) {
      this.#window.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
