/* Search without a server. Browsers refuse workers for pages opened from disk, so the search script runs in a hidden frame. */
(() => {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      const script = (source) =>
        new Promise((done, failed) => {
          const element = inside.document.createElement("script");
          Object.assign(element, { src: source, async: false, onload: done, onerror: failed });
          inside.document.body.appendChild(element);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...sources) => {
        for (const source of sources) await script(source);
      };
      this.ready = script(url);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.Worker = FrameWorker;
})();
